"""The split of a document, a function of its text unless its source sets it."""

from __future__ import annotations

import hashlib
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

_DIGEST_BYTES = 16


def text_digest(text: bytes) -> bytes:
    """[16] bytes that identify a text: BLAKE2b of its UTF-8."""
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()


def splits_of(heads: NDArray[np.uint64], shares: tuple[float, float, float]) -> NDArray[np.uint8]:
    """Position in ``SPLITS`` for each text.

    Args:
        heads: [num_texts] the first 8 bytes of each text's digest, as a big-endian number.
        shares: of train, valid and test, summing to 1.

    Returns:
        [num_texts] 0 for train, 1 for valid, 2 for test. The first 53 bits of a digest are a
        number in [0, 1) that is uniform over texts; the shares divide that interval in three.
    """
    positions = (heads >> np.uint64(11)).astype(np.float64) * 2.0**-53
    train_end, valid_end, _ = accumulate(shares)
    return np.searchsorted([train_end, valid_end], positions, side="right").astype(np.uint8)
