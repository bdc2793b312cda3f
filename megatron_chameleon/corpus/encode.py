"""Encode documents in memory."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.corpus.indexed import TokenFile, in_memory
from megatron_chameleon.storage import Location

# Characters that are encoded at a time: tokenizers take about 100 bytes of memory per character.
_CHARACTERS_AT_ONCE = 1 << 21


class TextEncoder(Protocol):
    """A tokenizer that encodes whole documents."""

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of everything that determines the ids."""

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
        """Encode texts: their concatenated tokens, and the number of tokens of each, at least 1."""


def encoded_documents(path: Location, encoder: TextEncoder, texts: Sequence[str]) -> TokenFile:
    """Encode ``texts`` in memory, one document each; ``path`` is the location for messages."""
    return in_memory(path, *encode_in_batches(encoder, texts))


def encode_in_batches(
    encoder: TextEncoder, texts: Sequence[str]
) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
    """Encode ``texts`` as ``encoder`` does, in batches that fit in memory."""
    batches = np.cumsum([len(text) for text in texts]) // _CHARACTERS_AT_ONCE
    grouped = itertools.groupby(zip(batches.tolist(), texts, strict=True), operator.itemgetter(0))
    encoded = [encoder.encode_documents([text for _, text in batch]) for _, batch in grouped]
    tokens, lengths = zip(*encoded, strict=True)
    return np.concatenate(tokens), np.concatenate(lengths)
