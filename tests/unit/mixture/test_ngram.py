"""Interpolated n-gram models, compared with dictionaries of counts."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.mixture.ngram import NgramModel


def reference_probability(train: list[int], context: tuple[int, ...], token: int, vocab: int):
    """Evaluate the recursion of Witten and Bell by its definition."""
    if not context:
        shorter = 1.0 / vocab
    else:
        shorter = reference_probability(train, context[1:], token, vocab)
    width = len(context)
    after = [
        train[i + width]
        for i in range(len(train) - width)
        if tuple(train[i : i + width]) == context
    ]
    if not after:
        return shorter
    distinct = len(set(after))
    return (after.count(token) + distinct * shorter) / (len(after) + distinct)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_are_those_of_the_recursion(order):
    rng = np.random.default_rng(order)
    vocab = 6
    train, target = rng.integers(0, 5, 60).tolist(), rng.integers(0, vocab, 40).tolist()
    found = NgramModel.fit(train, vocab, order).probabilities(target)
    expected = [
        reference_probability(train, tuple(target[max(0, i - order + 1) : i]), token, vocab)
        for i, token in enumerate(target)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_vocabulary_of_a_large_tokenizer_does_not_overflow():
    vocab = 1 << 18
    stream = np.array([vocab - 1, vocab - 2, vocab - 3] * 50)
    model = NgramModel.fit(stream, vocab, order=5)
    assert model.probabilities(stream)[10:].min() > 0.9


@pytest.mark.parametrize("tokens", [[], [0, 9], [-1]])
def test_tokens_outside_the_vocabulary_are_errors(tokens):
    with pytest.raises(ValueError, match="token"):
        NgramModel.fit(tokens, 9)
