"""Which held-out tokens are predicted, and from what: the packed windows of a domain's split."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True)
class HeldOutText:
    """Windows of a token stream.

    Window w predicts tokens ``w * window_length + 1`` to ``(w + 1) * window_length`` of ``stream``,
    each from those before it in the window, so that no token is predicted twice. The last window
    of the stream may be shorter.

    Attributes:
        stream: [n] tokens; documents follow one another, each with its end-of-document token.
        window_length: tokens predicted from one window.
        windows: [w] int64, in rising order: the windows that are predicted.
    """

    stream: NDArray[np.integer]
    window_length: int
    windows: NDArray[np.int64]

    @property
    def num_predictions(self) -> int:
        """Tokens that are predicted."""
        return int(self._lengths().sum())

    def labels(self) -> NDArray[np.int64]:
        """The tokens that are predicted, [num_predictions] int64, in their order."""
        if not len(self.windows):
            return np.empty(0, dtype=np.int64)
        return np.concatenate([self._predicted(int(window)) for window in self.windows])

    def batch(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Windows ``first`` to ``last`` - 1 of ``windows``, filled up with token 0 where short.

        Returns:
            tokens, labels (both int64) and the mask of what is predicted (bool), each
            [b, window_length].
        """
        shape = (last - first, self.window_length)
        tokens, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        lengths = self._lengths()[first:last]
        for row, window in enumerate(self.windows[first:last]):
            start, length = int(window) * self.window_length, int(lengths[row])
            tokens[row, :length] = self.stream[start : start + length]
            labels[row, :length] = self._predicted(int(window))
        mask = np.arange(self.window_length)[None, :] < lengths[:, None]
        return torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(mask)

    def _lengths(self) -> NDArray[np.int64]:
        left = len(self.stream) - 1 - self.windows * self.window_length
        return np.minimum(left, self.window_length)

    def _predicted(self, window: int) -> NDArray[np.int64]:
        start = window * self.window_length + 1
        return np.asarray(self.stream[start : start + self.window_length], dtype=np.int64)


def choose_windows(
    stream: NDArray[np.integer], window_length: int, max_tokens: int | None = None
) -> HeldOutText:
    """All windows of ``stream`` [n], or as many as ``max_tokens`` allow, spread evenly over it.

    The beginning alone would stand for the few documents that happen to come first.

    Args:
        stream: at least 2 tokens.
        window_length: tokens predicted from one window.
        max_tokens: predicted tokens, at most; not below ``window_length``.
    """
    num_predictions = len(stream) - 1
    if max_tokens is None or num_predictions <= max_tokens:
        windows = np.arange(-(-num_predictions // window_length))
    else:
        whole = num_predictions // window_length
        wanted = min(max_tokens // window_length, whole)
        windows = np.linspace(0, whole - 1, wanted).round().astype(np.int64)
    return HeldOutText(stream, window_length, windows)
