"""Windows of text to embed, sampled by seed and domain."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.blend.token_data import DomainData
from megatron_chameleon.corpus.indexed import BlockTokens, TokenFile
from megatron_chameleon.storage import Location


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows as token ranges: ``length`` tokens from ``start`` of ``document``.

    Arrays are [n] int64. ``document`` is the document in which a window starts; the window may
    extend into the documents that follow.
    """

    document: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.document)

    def longest_first(self) -> Windows:
        """Return the windows sorted by length, so that batches need little padding."""
        order = np.argsort(-self.length, kind="stable")
        return Windows(self.document[order], self.start[order], self.length[order])


def draw_windows(
    document_lengths: NDArray[np.integer],
    window_length: int,
    num_windows: int,
    seed: int,
    name: str,
    *,
    cross_documents: bool = False,
) -> Windows:
    """Sample distinct windows of at most ``window_length`` tokens.

    Each document is split into as few windows as possible, of nearly equal length, so that no
    window crosses documents or is a short remainder. With ``cross_documents``, the concatenation of
    all documents is split instead. The sample depends only on ``seed`` and the domain's ``name``. A
    domain with fewer than ``num_windows`` windows yields all of them.

    Args:
        document_lengths: [d] tokens per document.
        window_length: maximum tokens per window.
        num_windows: maximum number of windows.
        seed: seed of the sample.
        name: the domain.
        cross_documents: whether windows may cross documents.
    """
    lengths = np.asarray(document_lengths, dtype=np.int64)
    if cross_documents:
        together = draw_windows(lengths.sum(keepdims=True), window_length, num_windows, seed, name)
        ends = np.cumsum(lengths)
        document = np.searchsorted(ends, together.start, side="right")
        start = together.start - (ends[document] - lengths[document])
        return Windows(document, start, together.length)
    per_document = -(-lengths // window_length)
    ends, available = np.cumsum(per_document), int(per_document.sum())
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    chosen = np.sort(generator.choice(available, min(num_windows, available), replace=False))
    document = np.searchsorted(ends, chosen, side="right")
    part = chosen - (ends[document] - per_document[document])
    start = lengths[document] * part // per_document[document]
    end = lengths[document] * (part + 1) // per_document[document]
    return Windows(document, start, end - start)


def spread_windows(document_lengths: NDArray[np.integer], window_length: int, most: int) -> Windows:
    """Choose at least one and at most ``most`` evenly spaced windows of each document.

    Each document is split as by :func:`draw_windows`. Of its p windows, the m windows with numbers
    floor((i + 1/2) p / m) are chosen, for i = 0 to m - 1.

    Args:
        document_lengths: [d] tokens per document, at least 1 each.
        window_length: maximum tokens per window.
        most: maximum windows per document.
    """
    lengths = np.asarray(document_lengths, dtype=np.int64)
    num_windows = -(-lengths // window_length)
    taken = np.minimum(num_windows, most)
    document = np.repeat(np.arange(len(lengths)), taken)
    number = np.arange(len(document)) - np.repeat(np.cumsum(taken) - taken, taken)
    part = (2 * number + 1) * num_windows[document] // (2 * taken[document])
    start = lengths[document] * part // num_windows[document]
    end = lengths[document] * (part + 1) // num_windows[document]
    return Windows(document, start, end - start)


def load_windows(
    domain: DomainData, window_length: int, num_windows: int, seed: int
) -> tuple[TokenFile, Windows]:
    """Sample windows of ``domain`` with :func:`draw_windows`, and read them into memory.

    The sample depends only on ``seed`` and the domain's ``order_key``, not on where its files are.

    Args:
        domain: domain with at least one token.
        window_length: maximum tokens per window.
        num_windows: maximum number of windows.
        seed: seed of the sample.

    Returns:
        Tokens of these windows only, one document per window, and the windows, longest first.

    Raises:
        UserError: if the tokens are damaged or outside the vocabulary.
    """
    file = domain.open_documents()
    sampled = draw_windows(file.lengths, window_length, num_windows, seed, domain.order_key)
    sampled = sampled.longest_first()
    places = zip(
        sampled.document.tolist(), sampled.start.tolist(), sampled.length.tolist(), strict=True
    )
    tokens = np.concatenate([file.get(d, start, n) for d, start, n in places])
    document = np.arange(len(sampled))
    file = in_memory(file.prefix, tokens, sampled.length.astype(np.int32))
    return file, Windows(document, np.zeros_like(document), sampled.length)


def in_memory(path: Location, tokens: NDArray[np.integer], lengths: NDArray[np.int32]) -> TokenFile:
    """Return the token file of documents in memory.

    Args:
        path: location of the text, for messages.
        tokens: [num_tokens] concatenated tokens of all documents.
        lengths: [num_documents] tokens of each document.
    """
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * tokens.dtype.itemsize
    boundaries = np.arange(len(lengths) + 1, dtype=np.int64)
    return TokenFile(path, BlockTokens(path, tokens), lengths, pointers, boundaries)
