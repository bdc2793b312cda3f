"""numpy's own shuffle, several times faster: the same permutation, the same end state."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

# Reading and writing the generator's state costs about 40 microseconds; below this many elements
# numpy is done sooner.
SMALLEST = 8192

# Mersenne Twister, MT19937: Matsumoto and Nishimura 1998, https://doi.org/10.1145/272991.272995
STATE_WORDS = 624
MIDDLE_WORD = 397
UPPER_BIT = np.uint32(0x80000000)
LOWER_BITS = np.uint32(0x7FFFFFFF)
TWIST = np.uint32(0x9908B0DF)
TEMPER_B = np.uint32(0x9D2C5680)
TEMPER_C = np.uint32(0xEFC60000)

# Swap partners drawn before they are used: they stay in the first cache, and since they are all
# known, the processor waits for many of the swaps' cache misses at once.
BATCH = 2048


def shuffle(random_state: np.random.RandomState, array: NDArray[Any]) -> None:
    """Shuffle in place, as ``random_state.shuffle(array)`` does, to the last bit.

    numpy goes from the last element down and swaps element i with one of 0 to i, drawn from 32-bit
    words of a Mersenne Twister by masking, rejecting what is above i. Its stream is frozen, so that
    the order is the same with every version of numpy. Here the words are made and masked in
    batches, without a branch for each.

    What is not a contiguous array of integers of 4 or 8 bytes, has over 2**32 elements, or comes
    with another bit generator is handed to numpy itself.

    Args:
        random_state: generator; its state afterwards is the one numpy would leave. No other thread
            may draw from it meanwhile.
        array: [n] what to shuffle.
    """
    words = _as_words(array)
    state = random_state.get_state(legacy=False) if words is not None else {}
    if words is None or state["bit_generator"] != "MT19937":
        random_state.shuffle(array)
        return
    twister = state["state"]
    twister["pos"] = _shuffle(words, twister["key"], twister["pos"])
    random_state.set_state(state)


def shuffle_reference(random_state: np.random.RandomState, array: NDArray[Any]) -> None:
    """:func:`shuffle` word by word in plain Python, for tests; up to 2**32 elements."""
    for i in range(array.size - 1, 0, -1):
        mask = (1 << i.bit_length()) - 1
        partner = i + 1
        while partner > i:
            word = int(random_state.randint(0, 2**32, dtype=np.uint32))
            partner = word & mask
        array[[i, partner]] = array[[partner, i]]


def _as_words(array: NDArray[Any]) -> NDArray[Any] | None:
    """``array`` as unsigned words of its own width, or None where numpy has to do it."""
    fits = (
        type(array) is np.ndarray
        and array.ndim == 1
        and array.dtype.kind in "iu"
        and array.dtype.itemsize in (4, 8)
        and array.dtype.isnative
        and array.flags.c_contiguous
        and array.flags.writeable
    )
    if not fits or not SMALLEST <= array.size <= 2**32:
        return None
    return array.view(np.uint32 if array.dtype.itemsize == 4 else np.uint64)


@njit(cache=True, nogil=True)
def _shuffle(array: NDArray[Any], key: NDArray[np.uint32], position: int) -> int:
    """Shuffle with the generator at word ``position`` of ``key``; ``key`` is updated.

    Returns:
        Its position afterwards.
    """
    words = np.empty(STATE_WORDS, np.uint32)
    _temper(key, words)
    # One more than is used: a rejected draw is written where the next one goes.
    partners = np.empty(BATCH + 1, np.uint32)
    top = array.size - 1
    while top > 0:
        mask = _mask_of(top)
        # A batch ends where the mask becomes shorter.
        count = min(BATCH, top - (mask >> 1))
        position = _draw_partners(key, words, position, top, mask, count, partners)
        for i in range(count):
            partner = partners[i]
            array[top - i], array[partner] = array[partner], array[top - i]
        top -= count
    return position


@njit(cache=True, nogil=True)
def _mask_of(top: int) -> int:
    """The smallest 2**b - 1 that is not less than ``top``."""
    mask = top
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> shift
    return mask


@njit(cache=True, nogil=True)
def _draw_partners(
    key: NDArray[np.uint32],
    words: NDArray[np.uint32],
    position: int,
    top: int,
    mask: int,
    count: int,
    partners: NDArray[np.uint32],
) -> int:
    """Draw the partners of elements ``top``, ``top - 1`` ... ``top - count + 1``."""
    word_mask = np.uint32(mask)
    drawn = 0
    while drawn < count:
        if position == STATE_WORDS:
            _next_words(key)
            _temper(key, words)
            position = 0
        # So few words that they cannot overfill the batch.
        stop = position + min(STATE_WORDS - position, count - drawn)
        for i in range(position, stop):
            partner = words[i] & word_mask
            partners[drawn] = partner
            drawn += int(np.int64(partner) <= top - drawn)
        position = stop
    return position


@njit(cache=True, nogil=True)
def _next_words(key: NDArray[np.uint32]) -> None:
    """The next 624 words of the generator's state."""
    for i in range(STATE_WORDS - MIDDLE_WORD):
        key[i] = key[i + MIDDLE_WORD] ^ _twisted(key[i], key[i + 1])
    for i in range(STATE_WORDS - MIDDLE_WORD, STATE_WORDS - 1):
        key[i] = key[i + MIDDLE_WORD - STATE_WORDS] ^ _twisted(key[i], key[i + 1])
    last = STATE_WORDS - 1
    key[last] = key[MIDDLE_WORD - 1] ^ _twisted(key[last], key[0])


@njit(cache=True, nogil=True)
def _twisted(word: np.uint32, following: np.uint32) -> np.uint32:
    mixed = np.uint32((word & UPPER_BIT) | (following & LOWER_BITS))
    return np.uint32((mixed >> np.uint32(1)) ^ (TWIST if mixed & np.uint32(1) else np.uint32(0)))


@njit(cache=True, nogil=True)
def _temper(key: NDArray[np.uint32], words: NDArray[np.uint32]) -> None:
    """What the generator gives for each word of its state."""
    for i in range(STATE_WORDS):
        word = key[i]
        word ^= word >> np.uint32(11)
        word ^= np.uint32(word << np.uint32(7)) & TEMPER_B
        word ^= np.uint32(word << np.uint32(15)) & TEMPER_C
        words[i] = word ^ (word >> np.uint32(18))
