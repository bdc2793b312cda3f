from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.blend.gather import ROUNDS, permuted
from megatron_chameleon.blend.streams import permutation_key

WORD = 2**64 - 1


def permute_positions(positions, size, key):
    return np.array([permuted(i, size, np.uint64(key)) for i in np.asarray(positions).tolist()])


def reference(position, size, key):
    """:func:`permuted` in plain Python."""
    half = max(1, -(-(size - 1).bit_length() // 2))
    while True:
        left, right = position >> half, position % 2**half
        for number in range(ROUNDS):
            mixed = right ^ (key + (number + 1) * 0x9E3779B97F4A7C15 & WORD)
            mixed = (mixed ^ mixed >> 33) * 0xFF51AFD7ED558CCD & WORD
            mixed = (mixed ^ mixed >> 33) * 0xC4CEB9FE1A85EC53 & WORD
            left, right = right, left ^ (mixed ^ mixed >> 33) % 2**half
        position = left << half | right
        if position < size:
            return position


KEYS = st.integers(0, 2**64 - 1)


@given(st.integers(1, 3000), KEYS)
def test_every_position_goes_to_a_place_of_its_own(size, key):
    permuted = permute_positions(np.arange(size), size, key)
    assert permuted.dtype == np.int64
    np.testing.assert_array_equal(np.sort(permuted), np.arange(size))


@given(st.integers(1, 2**62), KEYS, st.data())
def test_fast_and_plain_agree(size, key, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    found = permute_positions(np.array(positions), size, key)
    assert found.tolist() == [reference(p, size, key) for p in positions]
    assert (found >= 0).all()
    assert (found < size).all()


@pytest.mark.parametrize("size", [3, 4, 5, 16, 17, 1000, 4096, 100_003])
def test_positions_are_spread_evenly(size):
    # Where the first, the last and a middle position go, over many keys: a chi-square test, which
    # a good permutation fails once in 10^6 times (here never: the keys are fixed).
    keys = [permutation_key(number, size) for number in range(4000)]
    bins = min(size, 16)
    for position in (0, size // 2, size - 1):
        places = np.array([permute_positions(np.array([position]), size, k)[0] for k in keys])
        counts = np.bincount(places * bins // size, minlength=bins)
        edges = -(-np.arange(bins + 1) * size // bins)
        expected = len(keys) * np.diff(edges) / size
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert statistic < bins - 1 + 6 * np.sqrt(2 * (bins - 1)), position


@pytest.mark.parametrize("size", [1000, 4097, 65536])
def test_neighbours_do_not_stay_together(size):
    permuted = permute_positions(np.arange(size), size, permutation_key(1, size)).astype(float)
    for lag in (1, 2, 16):
        correlation = np.corrcoef(permuted[:-lag], permuted[lag:])[0, 1]
        assert abs(correlation) < 5 / np.sqrt(size), lag
    # A random permutation has one fixed point on average, and one pair of neighbours each way.
    assert (permuted == np.arange(size)).sum() < 8
    assert (np.abs(np.diff(permuted)) == 1).sum() < 12


def test_two_keys_have_nothing_in_common():
    first, second = (
        permute_positions(np.arange(5000), 5000, permutation_key(7, epoch)) for epoch in (0, 1)
    )
    assert (first == second).sum() < 8
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(5000)


def test_the_orders_of_an_epoch_never_change():
    # They decide what a run that was interrupted goes on with, whatever was updated meanwhile.
    assert permutation_key(1234, 5, 0, 1) == KEY
    assert permute_positions(np.arange(8), 8, KEY).tolist() == FEISTEL_ORDER


KEY = 4366374342567971827
FEISTEL_ORDER = [4, 2, 3, 7, 5, 1, 6, 0]
