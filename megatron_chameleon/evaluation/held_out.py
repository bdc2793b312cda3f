"""Windows over held-out text, which determine the scored tokens and their contexts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Protocol
from megatron_chameleon.corpus.domains import DomainTokens
from megatron_chameleon.corpus.indexed import TokenFile, Tokens
from megatron_chameleon.corpus.windows import numbers_within
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.flops import forward_flops

# Number of windows per block when a whole split is scanned.
_BLOCK_WINDOWS = 1 << 10


@dataclasses.dataclass(frozen=True)
class ScoredWindows:
    """Windows over a token stream, as arrays [w] int64 of stream positions in text order.

    Window w predicts the tokens ``begin[w]`` to ``end[w]`` - 1; the token before ``begin[w]`` is
    its first input. Tokens from ``scored[w]`` on are scored; earlier tokens are context, already
    scored by the previous window.
    """

    begin: NDArray[np.int64]
    scored: NDArray[np.int64]
    end: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[w] model input tokens."""
        return self.end - self.begin

    @property
    def num_scored(self) -> NDArray[np.int64]:
        """[w] scored tokens."""
        return self.end - self.scored

    def take(self, chosen: NDArray[np.integer]) -> ScoredWindows:
        """Return the windows at indices ``chosen``."""
        return ScoredWindows(self.begin[chosen], self.scored[chosen], self.end[chosen])


def cut_windows(
    first: NDArray[np.int64], sizes: NDArray[np.int64], window_length: int, overlap: int = 0
) -> ScoredWindows:
    """Split ranges of predicted tokens into windows; windows do not cross ranges.

    The first window of a range has ``window_length`` tokens. Each later window repeats the last
    ``overlap`` tokens of the previous window as context and scores the tokens after them; the last
    window of a range may be shorter.

    Args:
        first: [n] start of each range.
        sizes: [n] tokens in each range; an empty range has no window.
        window_length: maximum tokens predicted per window.
        overlap: from 0 to ``window_length`` - 1.
    """
    stride = window_length - overlap
    counts = np.where(sizes > 0, 1 + -(-np.maximum(sizes - window_length, 0) // stride), 0)
    source = np.repeat(np.arange(len(sizes)), counts)
    number = numbers_within(counts)
    begin = first[source] + number * stride
    return ScoredWindows(
        begin=begin,
        scored=np.where(number > 0, begin + overlap, begin),
        end=np.minimum(begin + window_length, first[source] + sizes[source]),
    )


def spread_evenly(windows: ScoredWindows, max_tokens: int | None) -> ScoredWindows:
    """Choose evenly spaced windows that score at most ``max_tokens`` in total.

    Choosing the first windows instead would represent only the first few documents.

    Args:
        windows: windows that each score at most ``max_tokens`` tokens.
        max_tokens: maximum number of scored tokens; None keeps all windows.
    """
    scored = windows.num_scored
    total = int(scored.sum())
    if max_tokens is None or total <= max_tokens:
        return windows
    for count in range(len(scored) * max_tokens // total, 0, -1):
        chosen = np.linspace(0, len(scored) - 1, count).round().astype(np.int64)
        if scored[chosen].sum() <= max_tokens:
            return windows.take(chosen)
    raise AssertionError("a single window scores more than max_tokens")


@dataclasses.dataclass(frozen=True)
class HeldOutText:
    """Windows over the token stream of a split.

    Attributes:
        stream: [n] tokens; documents are concatenated, each with its end-of-document token.
        window_length: maximum tokens predicted per window.
        windows: windows over ``stream``; every token is scored in at most one window.
        eod_id: model input before the first token of a document where ``after_eod`` is set.
        after_eod: [w] bool, whether a window starts with the first token of a document and predicts
            it from ``eod_id``; None if no window does.
        leave_out: id of a token whose predictions are not scored; None scores all tokens.
    """

    stream: Tokens | DomainTokens
    window_length: int
    windows: ScoredWindows
    eod_id: int = 0
    after_eod: NDArray[np.bool_] | None = None
    leave_out: int | None = None

    @property
    def num_predictions(self) -> int:
        """Number of tokens that windows score, including tokens equal to ``leave_out``."""
        return int(self.windows.num_scored.sum())

    def arrays(
        self, first: int, last: int, width: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
        """Return windows ``first`` to ``last`` - 1, padded on the right with token 0.

        Args:
            first: index of the first window.
            last: index after the last window.
            width: at least the length of each window; default: the window length.

        Returns:
            [b, width] arrays: tokens, labels, whether the label is scored, and the position of the
            label in the stream (arbitrary for padding).
        """
        begin, scored, end = (
            edge[first:last, None]
            for edge in (self.windows.begin, self.windows.scored, self.windows.end)
        )
        positions = begin + np.arange(width or self.window_length)
        is_inside = positions < end
        labels, tokens = (
            # Clipping changes no result: a clipped position is padding, or eod_id replaces its
            # token below.
            np.where(is_inside, self.stream[np.clip(at, 0, end - 1)], 0).astype(np.int64)
            for at in (positions, positions - 1)
        )
        if self.after_eod is not None:
            tokens[self.after_eod[first:last], 0] = self.eod_id
        is_scored = is_inside & (positions >= scored)
        if self.leave_out is not None:
            is_scored &= labels != self.leave_out
        return tokens, labels, is_scored, positions

    def scored_blocks(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield positions [n] and labels [n] of scored tokens, in text order, block by block."""
        for first in range(0, len(self.windows), _BLOCK_WINDOWS):
            _, labels, is_scored, positions = self.arrays(
                first, min(first + _BLOCK_WINDOWS, len(self.windows))
            )
            yield positions[is_scored], labels[is_scored]

    def longest_first(self) -> HeldOutText:
        """Return the same windows sorted by length, so that batches need little padding."""
        order = np.argsort(-self.windows.lengths, kind="stable")
        after_eod = None if self.after_eod is None else self.after_eod[order]
        return dataclasses.replace(self, windows=self.windows.take(order), after_eod=after_eod)


def choose_windows(
    stream: Tokens | DomainTokens,
    window_length: int,
    max_tokens: int | None = None,
    overlap: int = 0,
    tokens: range | None = None,
) -> HeldOutText:
    """Split ``stream`` [n] into windows of one length across document boundaries, as in training.

    The first token is not predicted. With ``max_tokens``, a shorter last window is left out.

    Args:
        stream: token stream; fewer than 2 tokens give no window.
        window_length: tokens predicted per window.
        max_tokens: maximum predicted tokens, at least ``window_length``; None for all.
        overlap: see :func:`cut_windows`.
        tokens: positions that windows may read; default: the whole stream, unless it is a domain.
    """
    if tokens is None:
        assert not isinstance(stream, DomainTokens), "its .bin may hold other text"
        tokens = range(len(stream))
    size = max(len(tokens) - 1, 0)
    windows = cut_windows(np.array([tokens.start + 1]), np.array([size]), window_length, overlap)
    if max_tokens is not None and size > max_tokens:
        is_whole = windows.lengths == window_length
        windows = spread_evenly(windows.take(np.flatnonzero(is_whole)), max_tokens)
    return HeldOutText(stream, window_length, windows)


def held_out_text(tokens: TokenFile, protocol: Protocol, eod_id: int) -> HeldOutText | None:
    """Return the windows of a split under ``protocol``; None if nothing is scored.

    Args:
        tokens: the split, one document per sequence.
        protocol: protocol with a window length that fits the model's positions.
        eod_id: id of the end-of-document token.
    """
    length, leave_out = protocol.window_length, None if protocol.end_of_document else eod_id
    if protocol.packing == "packed":
        text = choose_windows(tokens.tokens, length, protocol.max_tokens, protocol.overlap)
        text = dataclasses.replace(text, leave_out=leave_out)
    else:
        skipped = 0 if protocol.first_token == "after-eod" else 1
        ends = tokens.starts + tokens.lengths.astype(np.int64)
        if not protocol.end_of_document:
            last = tokens.tokens[np.maximum(ends - 1, 0)] if tokens.tokens.size else ends
            ends = ends - ((tokens.lengths > 0) & (last == eod_id))
        first = tokens.starts + skipped
        windows = cut_windows(first, np.maximum(ends - first, 0), length, protocol.overlap)
        windows = spread_evenly(windows, protocol.max_tokens)
        after_eod = None if skipped else np.isin(windows.begin, first)
        text = HeldOutText(tokens.tokens, length, windows, eod_id, after_eod, leave_out)
    return text if any(len(positions) for positions, _ in text.scored_blocks()) else None


def reading_flops(config: ModelConfig, text: HeldOutText) -> float:
    """Count the forward FLOPs of all windows of ``text``, with context and without padding."""
    lengths, counts = np.unique(text.windows.lengths, return_counts=True)
    return sum(
        forward_flops(config, int(count * length), int(length))
        for length, count in zip(lengths, counts, strict=True)
    )
