"""Interpolated n-gram models of token streams, the cheapest experts of MixMin.

The probability of a token x after the context h of n - 1 tokens is interpolated with that after the
shorter context h', as by Witten and Bell (1991) and, for text compression, by Bell, Cleary and
Witten (1990):

    p(x | h) = (c(h x) + d(h) p(x | h')) / (c(h) + d(h)),

where c counts occurrences and d(h) is the number of distinct tokens after h. The recursion ends
with 1 / V, so that every token has a probability above 0. After a context that was not seen,
p(x | h) = p(x | h').
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array

Ids = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class _Level:
    """Counts of the n-grams of one order; position in ``keys`` is the id of an n-gram.

    Attributes:
        keys: [g] sorted; the key of an n-gram is (id of its context) * V + (its last token).
        counts: [g] occurrences.
        context_counts: [c] occurrences of each context, followed by any token.
        distinct: [c] distinct tokens after each context.
    """

    keys: Ids
    counts: Ids
    context_counts: Ids
    distinct: Ids


@dataclasses.dataclass(frozen=True, eq=False)
class NgramModel:
    """An interpolated n-gram model."""

    vocab_size: int
    levels: tuple[_Level, ...]

    @classmethod
    def fit(cls, tokens: npt.ArrayLike, vocab_size: int, order: int = 3) -> NgramModel:
        """Count the n-grams of a token stream, of orders 1 to ``order``.

        Args:
            tokens: [n] ids below ``vocab_size``; documents are concatenated, each with its
                end-of-document token, and contexts cross documents.
            vocab_size: V.
            order: largest n.

        Raises:
            ValueError: if there are no tokens, or an id is out of range.
        """
        stream = _ids(tokens, vocab_size)
        if not len(stream):
            raise ValueError("an n-gram model needs at least one token")
        levels = []
        context, num_contexts = np.zeros(len(stream), np.int64), 1
        for level in range(1, order + 1):
            # context[i] is the id of the tokens before position i + level - 1.
            keys, ids, counts = np.unique(
                context * vocab_size + stream[level - 1 :], return_inverse=True, return_counts=True
            )
            of_context = keys // vocab_size
            context_counts = np.zeros(num_contexts, np.int64)
            np.add.at(context_counts, of_context, counts)
            distinct = np.bincount(of_context, minlength=num_contexts)
            levels.append(_Level(keys, counts, context_counts, distinct))
            if len(ids) == 1:  # no token has a longer context
                break
            context, num_contexts = ids[:-1], len(keys)
        return cls(vocab_size, tuple(levels))

    def probabilities(self, tokens: npt.ArrayLike) -> Array:
        """Return the probability [n] float64 of each token of a stream after the tokens before it.

        Args:
            tokens: [n] ids below ``vocab_size``.

        Raises:
            ValueError: if an id is out of range.
        """
        stream = _ids(tokens, self.vocab_size)
        found = np.full(len(stream), 1.0 / self.vocab_size)
        # The id of the context of the current level that ends before each token; -1 if not seen.
        context = np.zeros(len(stream), np.int64)
        for level in self.levels:
            keys = context * self.vocab_size + stream
            at = np.minimum(np.searchsorted(level.keys, keys), len(level.keys) - 1)
            is_seen = (context >= 0) & (level.keys[at] == keys)
            counts = np.where(is_seen, level.counts[at], 0)
            # A context at the end of the training text was seen, but no token after it.
            total = np.where(context >= 0, level.context_counts[context], 0)
            distinct = np.where(context >= 0, level.distinct[context], 0)
            interpolated = (counts + distinct * found) / np.maximum(total + distinct, 1)
            found = np.where(total > 0, interpolated, found)
            context = np.append(-1, np.where(is_seen, at, -1)[:-1])
        return found


def _ids(tokens: npt.ArrayLike, vocab_size: int) -> Ids:
    """Return ``tokens`` as int64; raise ValueError for an id that is not in the vocabulary."""
    stream = np.asarray(tokens).astype(np.int64)
    if len(stream) and not 0 <= stream.min() <= stream.max() < vocab_size:
        raise ValueError(f"token ids must be from 0 to {vocab_size - 1}")
    return stream
