"""Which stretches of text are embedded: windows drawn by seed and domain."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows as ranges of tokens: ``length`` of them from ``start`` of ``document`` on.

    Arrays are [n] int64. One that crosses documents goes on in those after its own.
    """

    document: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.document)

    def longest_first(self) -> Windows:
        """The same windows in an order that leaves little padding in a batch."""
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
    """Draw windows of at most ``window_length`` tokens, none twice.

    Every document is cut into the fewest windows of nearly equal length that fit, so that no
    window crosses into another document and none is a mere rest; with ``cross_documents`` all of
    them together, as if they were one. The draw depends on ``seed`` and the domain's ``name``
    alone. A domain with fewer windows than asked for gives all it has.

    Args:
        document_lengths: [d] tokens per document.
        window_length: tokens per window, at most.
        num_windows: windows to draw, at most.
        seed: of the draw.
        name: the domain.
        cross_documents: whether windows may.
    """
    lengths = np.asarray(document_lengths, dtype=np.int64)
    if cross_documents:
        together = draw_windows(lengths.sum(keepdims=True), window_length, num_windows, seed, name)
        ends = np.cumsum(lengths)
        document = np.searchsorted(ends, together.start, side="right")
        start = together.start - (ends[document] - lengths[document])
        return Windows(document, start, together.length)
    per_document = -(-lengths // window_length)
    ends = np.cumsum(per_document)
    available = int(ends[-1]) if len(ends) else 0
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    chosen = np.sort(generator.choice(available, min(num_windows, available), replace=False))
    document = np.searchsorted(ends, chosen, side="right")
    part = chosen - (ends[document] - per_document[document])
    start = lengths[document] * part // per_document[document]
    end = lengths[document] * (part + 1) // per_document[document]
    return Windows(document, start, end - start)
