"""Orders that a few numbers decide: as an array, or position by position without one."""

from __future__ import annotations

import hashlib

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megatron_chameleon.blend.shuffle import shuffle

# Luby and Rackoff 1988: four rounds make a Feistel network of random functions a random
# permutation, as far as few questions can tell; the functions here are less than random.
ROUNDS = 8
# The multipliers of the finalizer of MurmurHash3, and the golden ratio, which tells rounds apart.
_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(33)
_WORD = 2**64 - 1


def permutation_key(*parts: int) -> int:
    """A number from 0 to 2**64 - 1 that is as good as random for each list of numbers."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8])


def epoch_permutation(
    size: int, seed: int, domain: int, epoch: int, purpose: int
) -> NDArray[np.int64]:
    """A permutation [size] of 0 to ``size`` - 1 that the other arguments alone decide.

    It is drawn by numpy's RandomState, whose stream is the same in every version of numpy.
    """
    key = permutation_key(seed, domain, epoch, purpose)
    order = np.arange(size)
    shuffle(np.random.RandomState([key >> 32, key & 0xFFFFFFFF]), order)
    return order


def permute_positions(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Where a permutation of 0 to ``size`` - 1 takes each of ``positions`` [n].

    Args:
        positions: [n] from 0 to ``size`` - 1.
        size: numbers permuted, from 1 on.
        key: which permutation, from 0 to 2**64 - 1.

    Raises:
        ValueError: for a position outside of the permutation.
    """
    if len(positions) and not 0 <= positions.min() <= positions.max() < size:
        raise ValueError(f"positions from {positions.min()} to {positions.max()} of {size}")
    return _permute_all(np.asarray(positions, np.int64), size, np.uint64(key))


@njit(cache=True, nogil=True)
def _permute_all(positions: NDArray[np.int64], size: int, key: np.uint64) -> NDArray[np.int64]:
    permuted = np.empty_like(positions)
    for i in range(positions.size):
        permuted[i] = permute_position(positions[i], size, key)
    return permuted


@njit(cache=True, nogil=True)
def permute_position(position: int, size: int, key: np.uint64) -> np.int64:
    """Where the permutation with ``key`` takes one position; nothing is kept for it.

    A Feistel network permutes the numbers of an even number of bits, up to four times as many as
    are wanted; one that is not wanted is permuted again, until one comes that is (cycle walking,
    Black and Rogaway 2002).
    """
    half = np.uint64(1)
    while np.int64(1) << np.int64(half + half) < size:
        half += np.uint64(1)
    mask = (np.uint64(1) << half) - np.uint64(1)
    permuted = np.uint64(position)
    while True:
        left, right = permuted >> half, permuted & mask
        for number in range(ROUNDS):
            mixed = right ^ (key + np.uint64(number + 1) * _GOLDEN_RATIO)
            mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX_1
            mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX_2
            left, right = right, left ^ ((mixed ^ (mixed >> _SHIFT)) & mask)
        permuted = (left << half) | right
        if permuted < np.uint64(size):
            return np.int64(permuted)


def permute_position_reference(position: int, size: int, key: int) -> int:
    """:func:`permute_position` in plain Python, for tests."""
    half = max(1, -(-(size - 1).bit_length() // 2))
    while True:
        left, right = position >> half, position % 2**half
        for number in range(ROUNDS):
            mixed = right ^ (key + (number + 1) * int(_GOLDEN_RATIO) & _WORD)
            mixed = (mixed ^ mixed >> 33) * int(_MIX_1) & _WORD
            mixed = (mixed ^ mixed >> 33) * int(_MIX_2) & _WORD
            left, right = right, left ^ (mixed ^ mixed >> 33) % 2**half
        position = left << half | right
        if position < size:
            return position
