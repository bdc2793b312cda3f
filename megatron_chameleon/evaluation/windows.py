"""How stretches of text are cut into windows, so that every token of theirs is scored once."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows over a token stream, by positions in it; all arrays are [w] int64, in text order.

    Window w predicts tokens ``begin[w]`` to ``end[w]`` - 1, each from those before it in the window
    and from the one before the first. Those from ``scored[w]`` on count; the others are context
    that an earlier window has scored.
    """

    begin: NDArray[np.int64]
    scored: NDArray[np.int64]
    end: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[w] tokens that go into the model."""
        return self.end - self.begin

    @property
    def num_scored(self) -> NDArray[np.int64]:
        """[w] tokens that count."""
        return self.end - self.scored

    def take(self, chosen: NDArray[np.integer]) -> Windows:
        """The windows at positions ``chosen``."""
        return Windows(self.begin[chosen], self.scored[chosen], self.end[chosen])


def cut(
    first: NDArray[np.int64], sizes: NDArray[np.int64], window_length: int, overlap: int = 0
) -> Windows:
    """Cut stretches of predicted tokens into windows.

    A stretch begins with a window of ``window_length``. Each further one takes over the last
    ``overlap`` tokens of the one before as context and scores those that follow; the last one of a
    stretch may be shorter.

    Args:
        first: [n] where each stretch begins.
        sizes: [n] how many tokens it has; one of 0 has no window.
        window_length: tokens predicted in one window, at most.
        overlap: from 0 to ``window_length`` - 1.
    """
    stride = window_length - overlap
    counts = np.where(sizes > 0, 1 + -(-np.maximum(sizes - window_length, 0) // stride), 0)
    stretch = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(stretch)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = first[stretch] + number * stride
    return Windows(
        begin=begin,
        scored=np.where(number > 0, begin + overlap, begin),
        end=np.minimum(begin + window_length, first[stretch] + sizes[stretch]),
    )


def spread_evenly(windows: Windows, max_tokens: int | None) -> Windows:
    """As many windows as score at most ``max_tokens`` together, spread evenly over all of them.

    The beginning alone would stand for the few documents that happen to come first.

    Args:
        windows: none of which scores more than ``max_tokens``.
        max_tokens: None for all windows.
    """
    scored = windows.num_scored
    total = int(scored.sum())
    if max_tokens is None or total <= max_tokens:
        return windows
    for count in range(len(scored) * max_tokens // total, 0, -1):
        chosen = np.linspace(0, len(scored) - 1, count).round().astype(np.int64)
        if scored[chosen].sum() <= max_tokens:
            return windows.take(chosen)
    raise AssertionError("one window alone scores more than that")
