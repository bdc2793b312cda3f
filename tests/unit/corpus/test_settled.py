from __future__ import annotations

import unicodedata

import regex  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.corpus.gigatoken import StableCharacters, is_stable

EVERYTHING = [chr(n) for n in range(0x110000) if not 0xD800 <= n < 0xE000]


@given(st.lists(st.text(max_size=20), max_size=8))
@settings(max_examples=200, deadline=None)
def test_texts_are_told_as_their_characters_are(texts):
    settled = StableCharacters()
    for text in texts:
        assert settled.all_in(text) == all(map(is_stable, text))


def test_two_releases_of_unicode_agree_on_what_is_settled():
    """This Python's, and the one of the regex package, which is newer."""
    differing: set[str] = set()
    for kind in "LNMZ":
        newer = set(regex.findall(rf"\p{{{kind}}}", "".join(EVERYTHING)))
        older = {c for c in EVERYTHING if unicodedata.category(c).startswith(kind)}
        differing |= newer ^ older
    assert not [c for c in differing if is_stable(c)]
    assert differing, "the releases are the same: this has shown nothing"


def test_what_was_asked_before_is_told_again():
    settled = StableCharacters()
    for text in ("plain", "Grüße, 世界 🌍", "\ue000 private", "new: \U0001fae8 \U0001fa77", ""):
        assert settled.all_in(text)
        assert settled.all_in(text)
    for character in ("\u0378", "\uffff", "\U0010ffff", "\U000323b0", "\U00010940", "\u1c89"):
        assert not settled.all_in(f"some words, then {character}")
        assert not settled.all_in(f"some words, then {character}")


def test_a_newer_python_settles_no_more(monkeypatch):
    monkeypatch.setattr(unicodedata, "category", lambda character: "Lo")
    assert is_stable("a")
    assert is_stable("世")
    assert not is_stable("\u1c89")  # of release 16
    assert not is_stable("\U00011f04")  # of release 15
