"""Pseudorandom permutations that are computed, not stored."""

from __future__ import annotations

import hashlib

import numpy as np
from numba import njit
from numpy.typing import NDArray

# Luby and Rackoff 1988: four rounds make a Feistel network of random functions a pseudorandom
# permutation. Our round function is only a hash mix, so 8 rounds are used.
ROUNDS = 8
# The multipliers of the finalizer of MurmurHash3; the golden ratio makes the rounds differ.
_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(33)


def permutation_key(*numbers: int) -> int:
    """Hash ``numbers`` to a pseudorandom number from 0 to 2**64 - 1."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8])


@njit(cache=True, nogil=True)
def permuted(position: int, size: int, key: np.uint64) -> np.int64:
    """Return the image of ``position`` under a pseudorandom permutation of 0 to ``size`` - 1.

    The permutation is never stored; each key selects one. A Feistel network permutes a domain of an
    even number of bits, up to four times ``size``; an image that is too large is permuted again
    (cycle walking, Black and Rogaway 2002).
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


@njit(cache=True, nogil=True)
def documents_with(
    lengths: NDArray[np.int32], num_tokens: int, key: np.uint64
) -> NDArray[np.int64]:
    """The fewest documents at the start of a shuffled order that hold ``num_tokens`` tokens.

    Args:
        lengths: [num_documents] length of each document, which sum to at least ``num_tokens``.
        num_tokens: number of tokens, at least 1.
        key: key of the permutation of the documents.

    Returns:
        [k] int64, positions in ``lengths``, in shuffled order.
    """
    total, count = np.int64(0), 0
    while total < num_tokens:
        total += lengths[permuted(count, lengths.size, key)]
        count += 1
    documents = np.empty(count, np.int64)
    for position in range(count):
        documents[position] = permuted(position, lengths.size, key)
    return documents
