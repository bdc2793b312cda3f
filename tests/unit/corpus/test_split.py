from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import SPLITS
from megatron_chameleon.corpus.split import splits_of, text_digest


def split_of(digest, shares):
    """The split of one text, one end of the interval after another."""
    position = (int.from_bytes(digest[:8]) >> 11) * 2.0**-53
    ends = zip(SPLITS, accumulate(shares), strict=True)
    return next((name for name, end in ends if position < end), SPLITS[-1])


def fast(digests, shares):
    heads = np.frombuffer(b"".join(digest[:8] for digest in digests), ">u8").astype(np.uint64)
    return [SPLITS[number] for number in splits_of(heads, shares)]


@given(
    st.lists(st.binary(min_size=16, max_size=16), max_size=20),
    st.sampled_from([(1 / 3, 1 / 3, 1 / 3), (0.25, 0.25, 0.5), (0.9, 0.05, 0.05)]),
)
def test_splits_of_many_are_those_of_each(digests, shares):
    digests += [b"\x00" * 16, b"\xff" * 16, b"\x80" + b"\x00" * 15, b"\x7f" + b"\xff" * 15]
    assert fast(digests, shares) == [split_of(digest, shares) for digest in digests]


def test_the_splits_follow_the_shares():
    shares = (0.8, 0.15, 0.05)
    splits = fast([text_digest(f"text {i}".encode()) for i in range(20_000)], shares)
    for name, share in zip(SPLITS, shares, strict=True):
        assert splits.count(name) / 20_000 == pytest.approx(share, abs=0.01)


def test_the_split_of_a_text_never_changes():
    """Corpora written by other releases must not share a document across splits with new ones."""
    assert text_digest(b"abc").hex() == "cf4ab791c62b8d2b2109c90275287816"
    digests = [text_digest(text) for text in (b"abc", b"d", b"e", b"h", b"m")]
    assert fast(digests, (0.34, 0.33, 0.33)) == ["test", "train", "valid", "test", "train"]
