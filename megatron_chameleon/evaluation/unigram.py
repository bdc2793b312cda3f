"""The loss of a model that looks at no context: a yardstick for every trained one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.corpus.indexed import Tokens

_CHUNK = 1 << 24


def token_counts(stream: Tokens, vocab_size: int) -> NDArray[np.int64]:
    """How often each token occurs, [vocab_size] int64."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, len(stream), _CHUNK):
        counts += np.bincount(stream[first : first + _CHUNK], minlength=vocab_size)
    return counts


def unigram_loss(
    training_counts: NDArray[np.int64], label_counts: NDArray[np.int64], vocab_size: int
) -> float:
    """Mean negative log-likelihood of labels in nats per token.

    Probabilities are the training frequencies with one added to every count (Laplace).

    Args:
        training_counts: [vocab_size] how often each token occurs in the training text.
        label_counts: [vocab_size] how often it is predicted; not all 0.
        vocab_size: tokens there are.
    """
    probabilities = (training_counts + 1) / (training_counts.sum() + vocab_size)
    return float(-(label_counts @ np.log(probabilities)) / label_counts.sum())
