"""Which split a document belongs to: a function of its text and of nothing else."""

from __future__ import annotations

import hashlib
import math
from itertools import accumulate

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


def split_of(digest: bytes, shares: tuple[float, float, float]) -> Split:
    """The split of the text with this digest.

    The digest's first 53 bits are a number in [0, 1) that is uniform over texts; the shares cut
    that interval in three.
    """
    position = (int.from_bytes(digest[:8]) >> 11) * 2.0**-53
    for name, end in zip(SPLITS, accumulate(shares), strict=True):
        if position < end:
            return name
    return SPLITS[-1]  # the shares may add up to a little less than 1
