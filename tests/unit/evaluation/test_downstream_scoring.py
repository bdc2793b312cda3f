"""Log-likelihoods of packed rows beside a plain loop over the questions, one at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.checkpoint.load import open_reader
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream import scoring
from megatron_chameleon.evaluation.downstream.prefix_rows import Packing, pack
from megatron_chameleon.evaluation.downstream.scoring import (
    Question,
    Scorer,
    batch_flops,
    batch_tensors,
)
from megatron_chameleon.model.flops import head_forward_flops
from tests.text_checkpoint import POSITIONS

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def reader(text_checkpoint, one_rank):
    return open_reader(CheckpointRecord.load(text_checkpoint.checkpoint), one_rank)


def question(context, continuation):
    return Question(np.array(context, np.int32), np.array(continuation, np.int32))


@pytest.fixture(scope="module")
def questions(reader):
    """Choices after contexts, alone or shared, of all lengths; some too long for the model."""
    rng = np.random.default_rng(0)

    def draw(length):
        return rng.integers(0, reader.shape.vocab_size, length).tolist()

    asked = []
    for length in (1, 5, 40, 41, 120, POSITIONS - 3, POSITIONS + 30):
        context = draw(length)
        asked += [question(context, draw(int(rng.integers(1, 12)))) for _ in range(4)]
        asked += [question(context, [token]) for token in draw(3)]  # of one token, as letters are
        asked += [question([*context[:-1], 7], draw(3))]  # another context with its beginning
    asked += [asked[0], question(draw(9), []), question(draw(2), draw(POSITIONS))]
    return [asked[number] for number in rng.permutation(len(asked))]


def plainly(reader, question):
    """(log-likelihood, whether it is greedy), from all logits of a pass over this question."""
    whole = np.concatenate([question.context, question.continuation]).astype(np.int64)
    tokens = torch.from_numpy(whole[-(POSITIONS + 1) :])
    inputs, length = tokens[None, :-1], len(question.continuation)
    if not length:
        return 0.0, True
    positions = torch.arange(inputs.size(1))[None]
    with torch.no_grad():
        logits = reader.model(inputs, positions, None)[0, -length:, : reader.shape.vocab_size]
    labels = tokens[-length:]
    scores = logits.double().log_softmax(dim=1).gather(1, labels[:, None])
    return float(scores.sum()), bool((logits.argmax(dim=1) == labels).all())


@pytest.fixture(scope="module")
def expected(reader, questions):
    return [plainly(reader, each) for each in questions]


@pytest.mark.parametrize("sequences_at_once", [1, 3, 100])
def test_scores_are_those_of_each_question_alone(reader, questions, expected, sequences_at_once):
    answers = Scorer(reader, sequences_at_once).score(questions)
    found, greedy = zip(*expected, strict=True)
    np.testing.assert_allclose(answers.log_likelihoods, found, rtol=0, atol=TOLERANCE)
    assert answers.is_greedy.tolist() == list(greedy)


def test_what_greedy_decoding_gives_is_known(reader):
    context = [5, 6, 7]
    greedy: list[int] = []
    for _ in range(4):
        tokens = torch.tensor([context + greedy])
        logits = reader.model(tokens, torch.arange(tokens.size(1))[None], None)
        greedy.append(int(logits[0, -1].argmax()))
    wrong = [*greedy[:3], (greedy[3] + 1) % 100]
    asked = [question(context, greedy), question(context, wrong), question(context, greedy[:2])]
    assert Scorer(reader, 1).score(asked).is_greedy.tolist() == [True, False, True]


def test_sharing_saves_work_and_changes_nothing(reader, questions, monkeypatch):
    shared = Scorer(reader, 8).score(questions)

    def alone_in_rows(sequences, predicting, packing):
        return pack(sequences, predicting, dataclasses.replace(packing, longest=0))

    monkeypatch.setattr(scoring, "pack", alone_in_rows)
    alone = Scorer(reader, 8).score(questions)
    np.testing.assert_allclose(shared.log_likelihoods, alone.log_likelihoods, atol=TOLERANCE)
    assert shared.flops < alone.flops / 2


def test_flops_are_those_of_the_shapes(reader):
    size = reader.shape.size
    context = list(range(10))
    (row,) = pack(
        [np.array([*context, 20], np.int32), np.array([*context, 30], np.int32)],
        [2, 2],
        Packing(longest=100, token_work=1.0, pair_work=0.0),
    )
    h, f, width = size.hidden_size, size.ffn_hidden_size, 12
    layer = width * (8 * h * h + 4 * h * f) + 4 * h * width**2
    places = 3  # the end of the context, and one of each answer
    expected = size.num_layers * layer + places * head_forward_flops(reader.shape)
    assert batch_flops(reader.shape, [row], width) == expected
    asked = [question(context, [20, 1]), question(context, [30, 1])]
    assert Scorer(reader, 1).score(asked).flops == expected


def test_contexts_that_lose_their_beginning_are_counted(reader):
    fits = question(range(POSITIONS), [1])
    too_long = question(range(POSITIONS), [1, 2])
    answers = Scorer(reader, 1).score([fits, too_long, too_long])
    assert answers.num_truncated == 2


def test_nothing_is_asked_and_nothing_answered(reader):
    answers = Scorer(reader, 1).score([])
    assert len(answers.log_likelihoods) == len(answers.is_greedy) == 0
    assert answers.flops == 0


def test_what_fills_rows_up_does_not_matter(reader):
    rows = pack(
        [np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32)],
        [1, 1],
        Packing(longest=100, token_work=1.0, pair_work=0.0),
    )
    states = []
    for width in (4, 9):
        tokens, positions, hidden = batch_tensors(rows, width).values()
        assert not hidden.all(dim=3).any()  # each token sees one at least
        tokens[:, 4:] = 17
        states.append(reader.final_hidden_states(tokens, positions, hidden)[:4])
    torch.testing.assert_close(states[0], states[1])


def test_a_model_that_has_diverged_is_told(reader):
    scorer = Scorer(reader, 1)
    weight = reader.model.embedding.word_embeddings.weight
    kept = weight[3].clone()
    try:
        with torch.no_grad():
            weight[3] = torch.nan
        with pytest.raises(UserError, match="not finite: the model has diverged"):
            scorer.score([question([3], [4])])
    finally:
        with torch.no_grad():
            weight[3] = kept
