"""The loss of a model that looks at no context: a yardstick for every trained one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 24


def token_counts(stream: NDArray[np.integer], vocab_size: int) -> NDArray[np.int64]:
    """How often each token occurs, [vocab_size] int64."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, len(stream), _CHUNK):
        counts += np.bincount(stream[first : first + _CHUNK], minlength=vocab_size)
    return counts


def unigram_loss(
    training_counts: NDArray[np.int64], labels: NDArray[np.integer], vocab_size: int
) -> float:
    """Mean negative log-likelihood of ``labels`` [n] in nats per token.

    Probabilities are the training frequencies with one added to every count (Laplace).
    """
    probabilities = (training_counts + 1) / (training_counts.sum() + vocab_size)
    seen = token_counts(labels, vocab_size)
    return float(-(seen @ np.log(probabilities)) / seen.sum())
