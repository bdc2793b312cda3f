"""Which split a document belongs to: a function of its text, unless its source says so."""

from __future__ import annotations

import hashlib
import math
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Split
from megatron_chameleon.errors import UserError

_DIGEST_BYTES = 16


def text_digest(text: bytes) -> bytes:
    """[16] bytes that tell texts apart: BLAKE2b of the UTF-8."""
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()


def parse_split(given: str) -> tuple[float, float, float]:
    """Shares of train, valid and test that sum to 1, from '90,5,5' or any such proportion.

    Raises:
        UserError: unless there are three positive numbers.
    """
    try:
        train, valid, test = (float(part) for part in given.split(","))
    except ValueError:
        raise UserError(
            f"--split {given}: three numbers with commas between are expected, as in 90,5,5"
        ) from None
    total = math.fsum((train, valid, test))
    if not (min(train, valid, test) > 0 and math.isfinite(total)):
        raise UserError(
            f"--split {given}: train, valid and test need a share above 0 each, since mixtures "
            "are judged on held-out text"
        )
    return train / total, valid / total, test / total


def splits_of(heads: NDArray[np.uint64], shares: tuple[float, float, float]) -> NDArray[np.uint8]:
    """Position in ``SPLITS`` for each text.

    Args:
        heads: [num_texts] the first 8 bytes of each text's digest, as a big-endian number.
        shares: of train, valid and test, summing to 1.

    Returns:
        [num_texts] 0 for train, 1 for valid, 2 for test. The first 53 bits of a digest are a
        number in [0, 1) that is uniform over texts; the shares cut that interval in three.
    """
    positions = (heads >> np.uint64(11)).astype(np.float64) * 2.0**-53
    train_end, valid_end, _ = accumulate(shares)
    return np.searchsorted([train_end, valid_end], positions, side="right").astype(np.uint8)


def split_of(digest: bytes, shares: tuple[float, float, float]) -> Split:
    """The split of one text, by its digest: what ``splits_of`` is compared with."""
    position = (int.from_bytes(digest[:8]) >> 11) * 2.0**-53
    for name, end in zip(SPLITS, accumulate(shares), strict=True):
        if position < end:
            return name
    return SPLITS[-1]  # the shares may add up to a little less than 1
