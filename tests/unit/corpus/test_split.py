from __future__ import annotations

from collections import Counter

import pytest

from megatron_chameleon.corpus.split import parse_split, split_of, text_digest
from megatron_chameleon.errors import UserError


def test_shares_are_proportions():
    assert parse_split("90,5,5") == (0.9, 0.05, 0.05)
    assert parse_split("969,30,1") == (0.969, 0.03, 0.001)
    assert parse_split(" 1, 1 ,2") == (0.25, 0.25, 0.5)


@pytest.mark.parametrize("given", ["", "90", "90,10", "1,2,3,4", "a,b,c", "90;5;5"])
def test_three_numbers_are_asked_for(given):
    with pytest.raises(UserError, match="three numbers"):
        parse_split(given)


@pytest.mark.parametrize("given", ["100,0,0", "0,50,50", "90,-5,15", "nan,1,1", "inf,1,1"])
def test_every_split_needs_a_share(given):
    with pytest.raises(UserError, match="above 0"):
        parse_split(given)


def test_the_split_depends_on_the_text_alone_and_follows_the_shares():
    shares = parse_split("80,15,5")
    texts = [f"text {i}".encode() for i in range(20_000)]
    splits = [split_of(text_digest(text), shares) for text in texts]
    assert splits == [split_of(text_digest(text), shares) for text in texts]
    counts = Counter(splits)
    assert counts["train"] / 20_000 == pytest.approx(0.80, abs=0.01)
    assert counts["valid"] / 20_000 == pytest.approx(0.15, abs=0.01)
    assert counts["test"] / 20_000 == pytest.approx(0.05, abs=0.01)


def test_the_ends_of_the_interval():
    shares = parse_split("1,1,1")
    assert split_of(b"\x00" * 16, shares) == "train"
    assert split_of(b"\xff" * 16, shares) == "test"
    assert split_of(b"\x80" + b"\x00" * 15, parse_split("1,1,2")) == "test"
    assert split_of(b"\x7f" + b"\xff" * 15, parse_split("1,1,2")) == "valid"


def test_the_split_of_a_text_never_changes():
    """Corpora written by other releases must not share a document across splits with new ones."""
    shares = parse_split("34,33,33")
    assert text_digest(b"abc").hex() == "cf4ab791c62b8d2b2109c90275287816"
    splits = [split_of(text_digest(text), shares) for text in (b"abc", b"d", b"e", b"h", b"m")]
    assert splits == ["test", "train", "valid", "test", "train"]
