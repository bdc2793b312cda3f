"""Compare scores and generated texts with plain loops and with lm-eval's own model class."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.checkpoint.open_model import CheckpointModel
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation import scoring
from megatron_chameleon.evaluation.lm_eval_model import ScorerLM
from megatron_chameleon.evaluation.scoring import Prompt, Question, Scorer, batch_tensors, pack
from megatron_chameleon.model import readout
from tests.fixtures.task_data import Words
from tests.text_checkpoint import EOD_TOKEN, POSITIONS, SMALL, write_text_checkpoint

TOLERANCE = 1e-4
WORDS = Words("requests")
CONTEXTS = [WORDS.text(number) for number in (1, 1, 2, 5, 9, 40)]

# There are few distinct tokens, so that sequences often share prefixes; token 300 takes two bytes.
SEQUENCES = st.lists(st.lists(st.sampled_from([0, 1, 2, 300]), min_size=1, max_size=6), min_size=1)


def attended(row, sequences):
    """Return the tokens and positions that each place of a row attends to."""
    batch = batch_tensors([row], sequences, row.length + 2)
    tokens, positions = batch["tokens"][0], batch["positions"][0]
    causal = torch.ones(row.length + 2, row.length + 2, dtype=torch.bool).tril()
    visible = ~batch["attention_mask"][0, 0] if "attention_mask" in batch else causal
    assert visible.any(dim=1).all()  # attention kernels disagree on fully masked rows
    return [(tokens[seen].tolist(), positions[seen].tolist()) for seen in visible]


@pytest.mark.parametrize(
    ("longest", "pairs_per_token"), [(10_000, 10**9), (0, 10**9), (8, 10)], ids=str
)
@given(lists=SEQUENCES)
def test_each_token_attends_to_its_own_sequence_only(longest, pairs_per_token, lists):
    sequences = [np.array(each, dtype=np.int32) for each in lists]
    rows = pack(sequences, longest, pairs_per_token)
    found = {index: (row, path) for row in rows for index, _, path in row.paths}
    assert sorted(found) == list(range(len(lists)))
    for index, each in enumerate(lists):
        row, path = found[index]
        seen = attended(row, sequences)
        for end, place in enumerate(path):
            assert seen[place] == (each[: end + 1], list(range(end + 1)))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Write all models now: a conversion forms its own process group, unlike ``one_rank``."""
    return {
        family: write_text_checkpoint(tmp_path_factory.mktemp(family), family=family)
        for family in SMALL
    }


@pytest.fixture(scope="module", params=SMALL)
def model(request, models):
    return models[request.param]


@pytest.fixture(scope="module")
def reader(model, one_rank):
    return CheckpointModel(CheckpointRecord.load(model.checkpoint)).reader(one_rank)


@pytest.fixture(scope="module")
def scorer(model, reader):
    """Factory of scorers: ``scorer(sequences_at_once)``."""
    tokenizer = load_tokenizer(model.tokenizer, EOD_TOKEN)
    return lambda sequences_at_once: Scorer(reader, sequences_at_once, tokenizer)


def question(context, continuation):
    return Question(np.array(context, np.int32), np.array(continuation, np.int32))


@pytest.fixture(scope="module")
def questions(reader):
    """Questions with contexts of all lengths; some are shared, some are too long."""
    rng = np.random.default_rng(0)

    def draw(length):
        return rng.integers(0, reader.config.vocab_size, length).tolist()

    questions = []
    for length in (1, 5, 40, 41, 120, POSITIONS - 3, POSITIONS + 30):
        context = draw(length)
        questions += [question(context, draw(int(rng.integers(1, 12)))) for _ in range(4)]
        # Continuations may be a single token, like the letters of multiple-choice answers.
        questions += [question(context, [token]) for token in draw(3)]
        questions += [question([*context[:-1], 7], draw(3))]  # shares a prefix with the others
    questions += [questions[0], question(draw(9), []), question(draw(2), draw(POSITIONS))]
    return [questions[number] for number in rng.permutation(len(questions))]


def reference_score(reader, question):
    """Compute (log-likelihood, is greedy) by a forward pass over only this question."""
    whole = np.concatenate([question.context, question.continuation]).astype(np.int64)
    tokens = torch.from_numpy(whole[-(POSITIONS + 1) :])
    inputs, length = tokens[None, :-1], len(question.continuation)
    if not length:
        return 0.0, True
    positions = torch.arange(inputs.size(1))[None]
    with torch.no_grad():
        logits = reader.model(inputs, positions, None)[0, -length:, : reader.config.vocab_size]
    labels = tokens[-length:]
    scores = logits.double().log_softmax(dim=1).gather(1, labels[:, None])
    return float(scores.sum()), bool((logits.argmax(dim=1) == labels).all())


@pytest.fixture(scope="module")
def expected(reader, questions):
    return [reference_score(reader, each) for each in questions]


@pytest.mark.parametrize(("sequences_at_once", "rows"), [(1, 1), (3, 50), (100, 10_000)])
def test_scores_equal_the_scores_of_each_question_alone(
    reader, scorer, questions, expected, monkeypatch, sequences_at_once, rows
):
    monkeypatch.setattr(scoring, "LOGITS_ON_CPU", rows * reader.config.vocab_size)
    # A single rank must not broadcast, since a broadcast waits for the device.
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", None)
    answers = scorer(sequences_at_once).score(questions)
    found, greedy = zip(*expected, strict=True)
    np.testing.assert_allclose(answers.log_likelihoods, found, rtol=0, atol=TOLERANCE)
    assert answers.is_greedy.tolist() == list(greedy)
    lengths = [len(each.context) + len(each.continuation) for each in questions]
    assert answers.num_truncated == sum(length > POSITIONS + 1 for length in lengths) > 0


def test_batches_do_not_grow_with_rotary_positions(reader, scorer, questions, monkeypatch):
    """Public models have up to a million positions."""
    monkeypatch.setattr(readout, "DEFAULT_WINDOW_LIMIT", POSITIONS)
    config, tokens = reader.config, []
    if config.is_rotary:
        config = dataclasses.replace(config, max_sequence_length=10**6)
    long = Scorer(dataclasses.replace(reader, config=config), 2, scorer(1).tokenizer)
    hook = reader.model.decoder.register_forward_hook(
        lambda _module, _inputs, states: tokens.append(states.shape[0] * states.shape[1])
    )
    with hook:
        long.score(questions)
    assert POSITIONS < max(tokens) <= 2 * POSITIONS


def test_sharing_prefixes_saves_flops_and_keeps_scores(scorer, questions, monkeypatch):
    shared = scorer(8).score(questions)
    monkeypatch.setattr(scoring, "pack", lambda sequences, _, pairs: pack(sequences, 0, pairs))
    alone = scorer(8).score(questions)
    np.testing.assert_allclose(shared.log_likelihoods, alone.log_likelihoods, atol=TOLERANCE)
    assert shared.flops < alone.flops / 2


def test_diverged_model_is_rejected(scorer, questions, monkeypatch):
    monkeypatch.setattr(Scorer, "_score_batch", lambda _, batch, sums: sums.fill_(torch.nan))
    with pytest.raises(UserError, match="not finite"):
        scorer(1).score(questions)


def instances(kind, *arguments):
    return [Instance(kind, {}, each, idx) for idx, each in enumerate(arguments)]


@pytest.fixture(scope="module")
def ours(scorer):
    return ScorerLM(scorer(2))


@pytest.fixture(scope="module")
def theirs(model):
    return HFLM(str(model.exported), device="cpu", dtype="float32", batch_size=4)


def test_log_likelihoods_equal_the_exported_models(ours, theirs):
    pairs = [(context, f" {WORDS.phrase()}") for context in CONTEXTS for _ in range(3)]
    pairs += [(context, answer) for context in CONTEXTS for answer in (" yes", " no")]
    pairs += [("", "Nothing stood before."), (CONTEXTS[1] + "  ", "two spaces"), pairs[4]]
    requests = instances("loglikelihood", *pairs)
    found, expected = (model.loglikelihood(requests) for model in (ours, theirs))
    scores, hits = zip(*found, strict=True)
    their_scores, their_hits = zip(*expected, strict=True)
    np.testing.assert_allclose(scores, their_scores, rtol=0, atol=TOLERANCE)
    assert hits == their_hits
    assert np.std(scores) > 1


def test_rolling_log_likelihoods_equal_the_exported_models(ours, theirs):
    texts = [(CONTEXTS[0],), (CONTEXTS[-1] + CONTEXTS[-2],), (CONTEXTS[2],), (CONTEXTS[-1],)]
    requests = instances("loglikelihood_rolling", *texts)
    found, expected = (model.loglikelihood_rolling(requests) for model in (ours, theirs))
    # A text has up to two windows, and each may differ by the tolerance.
    np.testing.assert_allclose(found, expected, rtol=0, atol=10 * TOLERANCE)


def test_generated_texts_equal_the_exported_models(ours, theirs):
    settings = [
        {"until": [stop], "max_gen_toks": number} for stop, number in ((".", 12), ("a", 40))
    ]
    requested = [(context, each) for context in CONTEXTS for each in settings]
    requests = instances("generate_until", *requested)
    found, expected = (model.generate_until(requests) for model in (ours, theirs))
    assert found == expected
    assert len(set(found)) > 3
    assert all("." not in text for text in found[::2])


def test_generation_ends_at_an_end_of_document(ours, monkeypatch):
    context = np.array(ours.tok_encode(CONTEXTS[0]), np.int32)
    prompt = Prompt(context, max_new_tokens=6, stops=())
    (six,), _ = ours.scorer.generate([prompt])
    assert len(six) == 6
    monkeypatch.setattr(ours.scorer, "eod_id", six[1])
    (ended,), _ = ours.scorer.generate([prompt])
    assert ended == six[: six.index(six[1]) + 1]
    assert len(ended) < 6
