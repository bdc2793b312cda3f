"""Which held-out tokens are predicted, and from what."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Protocol
from megatron_chameleon.corpus.indexed import TokenFile, Tokens
from megatron_chameleon.evaluation.windows import Windows, cut, spread_evenly

# Windows looked at together where all of a text is gone through.
_BLOCK_WINDOWS = 1 << 10


@dataclasses.dataclass(frozen=True)
class HeldOutText:
    """Windows of a token stream.

    Attributes:
        stream: [n] tokens; documents follow one another, each with its end-of-document token.
        window_length: tokens predicted from one window, at most.
        windows: those that are predicted; every token of the stream is scored in one at most.
        eod_id: what the first token of a document is predicted from, where ``after_eod`` says so.
        after_eod: [w] whether the window begins with a document that is predicted from there;
            None where no window does.
        leave_out: a token that is predicted but does not count; None if all count.
    """

    stream: Tokens
    window_length: int
    windows: Windows
    eod_id: int = 0
    after_eod: NDArray[np.bool_] | None = None
    leave_out: int | None = None

    @property
    def num_predictions(self) -> int:
        """Tokens that windows score, those of ``leave_out`` included."""
        return int(self.windows.num_scored.sum())

    def batch(
        self, first: int, last: int, width: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Windows ``first`` to ``last`` - 1 of ``windows``, filled up with token 0 where short.

        Args:
            first: from 0 on.
            last: at most the number of windows.
            width: at least the length of each of them; the window length unless given.

        Returns:
            tokens, labels (both int64) and the mask of what counts (bool), each [b, width].
        """
        positions, is_there = self._positions(first, last, width or self.window_length)
        labels = np.where(is_there, self._at(positions), 0)
        tokens = np.where(is_there, self._at(positions - 1), 0)
        if self.after_eod is not None:
            tokens[self.after_eod[first:last], 0] = self.eod_id
        mask = is_there & self._counts(positions, labels, first, last)
        return torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(mask)

    def positions(self, first: int, last: int, width: int | None = None) -> NDArray[np.int64]:
        """Where the labels of :meth:`batch` lie in ``stream``, [b, width]; -1 where there is none.

        Labels that do not count are there too.
        """
        positions, is_there = self._positions(first, last, width or self.window_length)
        return np.where(is_there, positions, -1)

    def scored_positions(self, first: int, last: int) -> NDArray[np.int64]:
        """[n] int64: where the labels lie that count in windows ``first`` to ``last`` - 1."""
        positions, is_there = self._positions(first, last, self.window_length)
        labels = np.where(is_there, self._at(positions), 0)
        counts: NDArray[np.int64] = positions[
            is_there & self._counts(positions, labels, first, last)
        ]
        return counts

    def blocks(self) -> list[tuple[int, int]]:
        """All windows, some at a time: the ``first`` and ``last`` of each block."""
        count = len(self.windows)
        starts = range(0, count, _BLOCK_WINDOWS)
        return [(start, min(start + _BLOCK_WINDOWS, count)) for start in starts]

    def longest_first(self) -> HeldOutText:
        """The same windows in an order in which neighbours are about as long."""
        order = np.argsort(-self.windows.lengths, kind="stable")
        after_eod = None if self.after_eod is None else self.after_eod[order]
        return dataclasses.replace(self, windows=self.windows.take(order), after_eod=after_eod)

    def _positions(
        self, first: int, last: int, width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        begin, end = self.windows.begin[first:last, None], self.windows.end[first:last, None]
        positions = begin + np.arange(width)
        return positions, positions < end

    def _at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens at ``positions``; of one outside of the stream, some token."""
        return self.stream[np.clip(positions, 0, len(self.stream) - 1)].astype(np.int64)

    def _counts(
        self, positions: NDArray[np.int64], labels: NDArray[np.int64], first: int, last: int
    ) -> NDArray[np.bool_]:
        is_new = positions >= self.windows.scored[first:last, None]
        return is_new if self.leave_out is None else is_new & (labels != self.leave_out)


def choose_windows(
    stream: Tokens,
    window_length: int,
    max_tokens: int | None = None,
    overlap: int = 0,
    tokens: range | None = None,
) -> HeldOutText:
    """Windows of ``stream`` [n] as in training: over the ends of documents, all of one length.

    All of them, or as many as ``max_tokens`` allow; the last, which may be shorter, is then none of
    them. The first token is not predicted.

    Args:
        stream: of less than 2 tokens, nothing is predicted.
        window_length: tokens predicted from one window.
        max_tokens: predicted tokens, at most; not below ``window_length``.
        overlap: see :func:`cut`.
        tokens: positions of the tokens that windows may read; all of the stream unless given.
    """
    tokens = range(len(stream)) if tokens is None else tokens
    size = max(len(tokens) - 1, 0)
    windows = cut(np.array([tokens.start + 1]), np.array([size]), window_length, overlap)
    if max_tokens is not None and size > max_tokens:
        is_whole = windows.lengths == window_length
        windows = spread_evenly(windows.take(np.flatnonzero(is_whole)), max_tokens)
    return HeldOutText(stream, window_length, windows)


def document_windows(tokens: TokenFile, protocol: Protocol, eod_id: int) -> HeldOutText:
    """Windows inside of documents, by a protocol of that packing; some documents have none."""
    starts, lengths = tokens.starts, tokens.lengths.astype(np.int64)
    skipped = 0 if protocol.first_token == "after-eod" else 1
    ends = starts + lengths
    if not protocol.end_of_document:
        last = tokens.tokens[np.maximum(ends - 1, 0)] if tokens.tokens.size else ends
        ends = ends - ((lengths > 0) & (last == eod_id))
    first = starts + skipped
    sizes = np.maximum(ends - first, 0)
    windows = cut(first, sizes, protocol.window_length, protocol.overlap)
    windows = spread_evenly(windows, protocol.max_tokens)
    return HeldOutText(
        tokens.tokens,
        protocol.window_length,
        windows,
        eod_id,
        after_eod=None if skipped else np.isin(windows.begin, first),
        leave_out=None if protocol.end_of_document else eod_id,
    )


def held_out_text(tokens: TokenFile, protocol: Protocol, eod_id: int) -> HeldOutText | None:
    """What ``protocol`` predicts of a split; None if that is nothing.

    Args:
        tokens: of the split, a document a sequence.
        protocol: with a window length that the model has.
        eod_id: the end-of-document token.
    """
    if protocol.packing == "documents":
        text = document_windows(tokens, protocol, eod_id)
    else:
        text = _packed_windows(tokens.tokens, protocol, eod_id)
    scores_something = any(len(text.scored_positions(*block)) for block in text.blocks())
    return text if scores_something else None


def _packed_windows(stream: Tokens, protocol: Protocol, eod_id: int) -> HeldOutText:
    """Windows over the ends of documents; a stream of less than two tokens has none."""
    length, leave_out = protocol.window_length, None if protocol.end_of_document else eod_id
    text = choose_windows(stream, length, protocol.max_tokens, protocol.overlap)
    return dataclasses.replace(text, leave_out=leave_out)
