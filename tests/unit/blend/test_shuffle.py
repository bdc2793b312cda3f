from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.blend.shuffle import BATCH, SMALLEST, shuffle, shuffle_reference

DTYPES = [np.uint32, np.int32, np.int64, np.uint64]


def assert_same_stream(one, other):
    """Both generators are in one state, to the last word."""
    mine, theirs = one.get_state(legacy=False), other.get_state(legacy=False)
    np.testing.assert_array_equal(mine["state"].pop("key"), theirs["state"].pop("key"))
    assert mine == theirs


def assert_shuffled_as_by_numpy(random_state, array):
    same = np.random.RandomState()
    same.set_state(random_state.get_state())
    expected = array.copy()
    same.shuffle(expected)
    shuffle(random_state, array)
    np.testing.assert_array_equal(array, expected)
    assert_same_stream(random_state, same)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size",
    [0, 1, 2, 3, 1000, SMALLEST - 1, SMALLEST, 2**14, 2**14 + 1, 5 * BATCH - 1, 2**17 - 1, 300_000],
)
def test_the_very_permutation_and_end_state_of_numpy(size, dtype):
    assert_shuffled_as_by_numpy(np.random.RandomState(size), np.arange(size).astype(dtype))


@settings(deadline=None, max_examples=60)
@given(st.integers(SMALLEST, 40_000), st.integers(0, 2**32 - 1), st.integers(0, 1500))
def test_from_any_state(size, seed, drawn_before):
    random_state = np.random.RandomState(seed)
    random_state.randint(0, 2**32, drawn_before, dtype=np.uint32)
    random_state.standard_normal(seed % 2)  # leaves a second one waiting, which must stay
    assert_shuffled_as_by_numpy(random_state, np.arange(size, dtype=np.int32))


def test_one_shuffle_after_another():
    random_state = np.random.RandomState(4)
    for size in (20_000, 10_000, 5, 30_000):
        assert_shuffled_as_by_numpy(random_state, np.arange(size, dtype=np.uint32))


def test_the_contents_do_not_matter():
    words = np.random.RandomState(0).randint(-(2**62), 2**62, 50_000)
    assert_shuffled_as_by_numpy(np.random.RandomState(9), words)


@pytest.mark.parametrize("size", [SMALLEST, SMALLEST + 5])
def test_reference_agrees(size):
    one, other = np.random.RandomState(3), np.random.RandomState(3)
    fast, slow = np.arange(size), np.arange(size)
    shuffle(one, fast)
    shuffle_reference(other, slow)
    np.testing.assert_array_equal(fast, slow)
    assert_same_stream(one, other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(20_000)[::2],
        lambda: np.arange(10_000, dtype=np.float64),
        lambda: np.arange(10_000, dtype=np.int16),
        lambda: np.arange(10_000).astype(">i8"),
        lambda: np.arange(20_000).reshape(10_000, 2),
    ],
    ids=["strided", "float", "short", "big-endian", "rows"],
)
def test_other_arrays_are_left_to_numpy(make):
    assert_shuffled_as_by_numpy(np.random.RandomState(1), make())


def test_another_bit_generator_is_left_to_numpy():
    one, other = (np.random.RandomState(np.random.PCG64(5)) for _ in range(2))
    array, expected = np.arange(10_000), np.arange(10_000)
    shuffle(one, array)
    other.shuffle(expected)
    np.testing.assert_array_equal(array, expected)


def test_read_only_arrays_are_refused():
    array = np.arange(10_000)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        shuffle(np.random.RandomState(0), array)
    np.testing.assert_array_equal(array, np.arange(10_000))
