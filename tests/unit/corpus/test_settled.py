from __future__ import annotations

import unicodedata

import regex  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.corpus.tokenization.settled import SettledCharacters, is_settled

EVERYTHING = [chr(n) for n in range(0x110000) if not 0xD800 <= n < 0xE000]


@given(st.lists(st.text(max_size=20), max_size=8))
@settings(max_examples=200, deadline=None)
def test_texts_are_told_as_their_characters_are(texts):
    settled = SettledCharacters()
    for text in texts:
        assert settled.all_in(text) == all(map(is_settled, text))


def test_two_releases_of_unicode_agree_on_what_is_settled():
    """This Python's, and the one of the regex package, which is newer."""
    differing: set[str] = set()
    for kind in "LNMZ":
        newer = set(regex.findall(rf"\p{{{kind}}}", "".join(EVERYTHING)))
        older = {c for c in EVERYTHING if unicodedata.category(c).startswith(kind)}
        differing |= newer ^ older
    assert not [c for c in differing if is_settled(c)]
    assert differing, "the releases are the same: this has shown nothing"


def test_all_but_the_newest_characters_are_settled():
    settled = [c for c in EVERYTHING if unicodedata.category(c) != "Cn" and is_settled(c)]
    assert len(settled) > 140_000
    assert all(map(is_settled, EVERYTHING[:0x378]))


def test_what_was_asked_before_is_told_again():
    settled = SettledCharacters()
    for text in ("plain", "Grüße, 世界 🌍", "\ue000 private", "new: \U0001fae8 \U0001fa77", ""):
        assert settled.all_in(text)
        assert settled.all_in(text)
    for character in ("\u0378", "\uffff", "\U0010ffff", "\U000323b0", "\U00010940", "\u1c89"):
        assert not settled.all_in(f"some words, then {character}")
        assert not settled.all_in(f"some words, then {character}")


def test_a_newer_python_settles_no_more(monkeypatch):
    monkeypatch.setattr(unicodedata, "category", lambda character: "Lo")
    assert is_settled("a")
    assert is_settled("世")
    assert not is_settled("\u1c89")  # of release 16
    assert not is_settled("\U00011f04")  # of release 15
