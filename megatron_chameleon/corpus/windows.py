"""Windows of text to embed, sampled by seed and domain."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
from numpy.typing import NDArray

# Default tokens per window, as in the authors' code.
WINDOW_LENGTH = 512


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
    within_documents: bool = False,
) -> Windows:
    """Sample distinct windows of the concatenation of all documents, all of one length.

    With windows of one length, the embedding of a domain does not depend on the lengths of its
    documents: every position of a window counts equally in every domain. The concatenation is split
    into windows of exactly ``window_length`` tokens, and a shorter rest is left out; only a domain
    of fewer tokens has a shorter window. The authors' code samples windows of 512 tokens in this
    way, but with replacement and at random offsets.

    With ``within_documents``, each document is split into as few windows as possible instead, of
    nearly equal length. Then no window crosses documents, and a window of a short document is
    short.

    The sample depends only on ``seed`` and the domain's ``name``. A domain with fewer than
    ``num_windows`` windows yields all of them.

    Args:
        document_lengths: [d] tokens per document.
        window_length: tokens per window; with ``within_documents``, the maximum.
        num_windows: maximum number of windows.
        seed: seed of the sample.
        name: the domain.
        within_documents: whether windows end at document boundaries.
    """
    lengths = np.asarray(document_lengths, dtype=np.int64)
    if within_documents:
        per_document = -(-lengths // window_length)
        ends = np.cumsum(per_document)
        chosen = _sample(int(per_document.sum()), num_windows, seed, name)
        document = np.searchsorted(ends, chosen, side="right")
        part = chosen - (ends[document] - per_document[document])
        start = lengths[document] * part // per_document[document]
        end = lengths[document] * (part + 1) // per_document[document]
        return Windows(document, start, end - start)
    ends, total = np.cumsum(lengths), int(lengths.sum())
    length = min(window_length, total)
    position = length * _sample(total // max(length, 1), num_windows, seed, name)
    document = np.searchsorted(ends, position, side="right")
    start = position - (ends[document] - lengths[document])
    return Windows(document, start, np.full_like(start, length))


def _sample(available: int, count: int, seed: int, name: str) -> NDArray[np.int64]:
    """Sample ``count`` of the numbers below ``available``, or all of them, in ascending order."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return np.sort(generator.choice(available, min(count, available), replace=False))


def split_at_documents(windows: Windows, document_lengths: NDArray[np.integer]) -> Windows:
    """Split windows at the document boundaries that they cross.

    Args:
        windows: windows of the documents, [n].
        document_lengths: [d] tokens per document.

    Returns:
        The parts, each in one document, in the order of ``windows``; [n] or more.
    """
    edges = np.append(0, np.cumsum(document_lengths, dtype=np.int64))
    starts = edges[windows.document] + windows.start
    return split_at_edges(edges, starts, windows.length)[1]


def split_at_edges(
    edges: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], Windows]:
    """Split ranges of tokens at the edges of documents.

    Args:
        edges: [d + 1] first token of each document, and the end.
        starts: [r] first token of each range.
        lengths: [r] tokens of each range, at least 1.

    Returns:
        The range of each part, [p], and the parts, each in one document, in the order of the
        ranges.
    """
    stops = starts + lengths
    first = np.searchsorted(edges, starts, side="right") - 1
    counts = np.searchsorted(edges, stops, side="left") - first
    index = np.repeat(np.arange(len(starts)), counts)
    document = first[index] + numbers_within(counts)
    begin = np.maximum(starts[index], edges[document])
    length = np.minimum(stops[index], edges[document + 1]) - begin
    kept = length > 0  # leave out documents without tokens
    return index[kept], Windows(document[kept], (begin - edges[document])[kept], length[kept])


def spread_windows(document_lengths: NDArray[np.integer], window_length: int, most: int) -> Windows:
    """Choose at least one and at most ``most`` evenly spaced windows of each document.

    Each document is split as by :func:`draw_windows` within documents. Of its p windows, the m
    windows with numbers floor((i + 1/2) p / m) are chosen, for i = 0 to m - 1.

    Args:
        document_lengths: [d] tokens per document, at least 1 each.
        window_length: maximum tokens per window.
        most: maximum windows per document.
    """
    lengths = np.asarray(document_lengths, dtype=np.int64)
    num_windows = -(-lengths // window_length)
    taken = np.minimum(num_windows, most)
    document = np.repeat(np.arange(len(lengths)), taken)
    part = (2 * numbers_within(taken) + 1) * num_windows[document] // (2 * taken[document])
    start = lengths[document] * part // num_windows[document]
    end = lengths[document] * (part + 1) // num_windows[document]
    return Windows(document, start, end - start)


def numbers_within(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the numbers from 0 to count - 1 of every count in ``counts`` [n], concatenated."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
