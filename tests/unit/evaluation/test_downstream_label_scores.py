"""Log-probabilities of labels beside a softmax over all logits at once."""

from __future__ import annotations

import pytest
import torch

from megatron_chameleon.evaluation.downstream import label_scores
from megatron_chameleon.evaluation.downstream.label_scores import (
    OutputWeights,
    likeliest,
    score_labels,
)

VOCAB_SIZE, PADDED = 21, 32


@pytest.fixture
def output():
    torch.manual_seed(0)
    weight = torch.randn(PADDED, 8)
    weight[VOCAB_SIZE:] *= 100  # whoever counts the padding finds it the likeliest
    return OutputWeights(weight, first=0, vocab_size=VOCAB_SIZE, group=None)


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_scores_are_those_of_a_softmax_over_the_real_vocabulary(output, rows_at_once, monkeypatch):
    monkeypatch.setattr(label_scores, "ELEMENTS_ON_CPU", rows_at_once * PADDED)
    hidden = torch.randn(10, 8)
    rows = torch.randint(0, 10, (40,)).sort().values
    labels = torch.randint(0, VOCAB_SIZE, (40,))
    scores, hits = score_labels(output, hidden, rows, labels)
    expected = (hidden @ output.weight[:VOCAB_SIZE].T).log_softmax(dim=1)
    torch.testing.assert_close(scores, expected[rows, labels])
    assert hits.tolist() == (expected.argmax(dim=1)[rows] == labels).tolist()
    assert 0 < hits.sum() < 40


def test_the_first_of_equally_likely_tokens_is_taken(output):
    logits = torch.zeros(1, PADDED)
    logits[0, [4, 7]] = 1.0
    assert likeliest(output, logits).tolist() == [4]


def test_a_rank_that_holds_padding_alone_has_no_logits(output):
    beyond = OutputWeights(output.weight, first=PADDED, vocab_size=VOCAB_SIZE, group=None)
    assert torch.isneginf(beyond.logits(torch.randn(2, 8))).all()
