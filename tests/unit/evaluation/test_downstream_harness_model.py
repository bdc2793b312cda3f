"""Our model for lm-eval beside lm-eval's own for the exported checkpoint, request by request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream.checkpoint_model import open_shared_model
from megatron_chameleon.evaluation.downstream.generation import Prompt
from megatron_chameleon.evaluation.downstream.harness_model import HarnessModel
from megatron_chameleon.evaluation.downstream.request_tokens import encode_pairs
from tests.fixtures.task_data import Words
from tests.text_checkpoint import EOD_TOKEN

TOLERANCE = 1e-4
WORDS = Words("requests")
CONTEXTS = [WORDS.text(number) for number in (1, 1, 2, 5, 9, 40)]


def instances(kind, *arguments):
    return [Instance(kind, {}, each, idx) for idx, each in enumerate(arguments)]


@pytest.fixture(scope="module")
def ours(text_checkpoint, one_rank):
    tokenizer = load_tokenizer(text_checkpoint.tokenizer, EOD_TOKEN)
    record = CheckpointRecord.load(text_checkpoint.checkpoint)
    shared = open_shared_model(record, tokenizer, one_rank, 2, bf16=False)
    return HarnessModel(shared, tokenizer)


@pytest.fixture(scope="module")
def theirs(text_checkpoint):
    return HFLM(str(text_checkpoint.exported), device="cpu", dtype="float32", batch_size=4)


def test_log_likelihoods_are_those_of_the_exported_model(ours, theirs):
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


def test_log_likelihoods_of_texts_are_those_of_the_exported_model(ours, theirs):
    texts = [(CONTEXTS[0],), (CONTEXTS[-1] + CONTEXTS[-2],), (CONTEXTS[2],), (CONTEXTS[-1],)]
    requests = instances("loglikelihood_rolling", *texts)
    found, expected = (model.loglikelihood_rolling(requests) for model in (ours, theirs))
    # Their windows are up to two to a text, each within the tolerance.
    np.testing.assert_allclose(found, expected, rtol=0, atol=10 * TOLERANCE)


def test_texts_are_generated_as_by_the_exported_model(ours, theirs):
    settings = [
        {"until": [stop], "max_gen_toks": number} for stop, number in ((".", 12), ("a", 40))
    ]
    asked = [(context, each) for context in CONTEXTS for each in settings]
    requests = instances("generate_until", *asked)
    found, expected = (model.generate_until(requests) for model in (ours, theirs))
    assert found == expected
    assert len(set(found)) > 3
    assert all("." not in text for text in found[::2])


def test_an_end_of_document_ends_a_generation(ours, monkeypatch):
    context = np.array(ours.tok_encode(CONTEXTS[0]), np.int32)
    prompt = Prompt(context, max_new_tokens=6, stops=())
    (six,) = ours.shared.generate([prompt]).tokens
    assert len(six) == 6
    monkeypatch.setattr(ours.shared.generator, "eod_id", six[1])
    (ended,) = ours.shared.generate([prompt]).tokens
    assert ended == six[: six.index(six[1]) + 1]
    assert len(ended) < 6


def test_a_stop_ends_a_generation(ours):
    context = np.array(ours.tok_encode(CONTEXTS[0]), np.int32)
    (six,) = ours.shared.generate([Prompt(context, max_new_tokens=6, stops=())]).tokens
    stop = ours.tok_decode(six[:2])
    (ended,) = ours.shared.generate([Prompt(context, max_new_tokens=6, stops=(stop,))]).tokens
    assert ended == six[:2]


def test_a_task_that_samples_is_refused(ours):
    settings = {"until": [], "do_sample": True, "temperature": 0.7}
    with pytest.raises(UserError, match="wants to sample"):
        ours.generate_until(instances("generate_until", ("A", settings)))


def test_a_continuation_that_is_longer_than_the_model_is_refused(ours):
    long = instances("loglikelihood", ("A", WORDS.text(60)))
    with pytest.raises(UserError, match=r"has \d+ tokens, and the model looks at 256 at most"):
        ours.loglikelihood(long)
    assert not ours.failed  # no rank was asked


def test_more_new_tokens_than_positions_are_refused(ours):
    settings = {"until": [], "max_gen_toks": 256}
    with pytest.raises(UserError, match="generates up to 256 tokens, and the model looks at 256"):
        ours.generate_until(instances("generate_until", ("A", settings)))


TEXTS = st.text(alphabet="ab é.\n", max_size=8)


@given(context=TEXTS, continuation=TEXTS.filter(bool))
def test_pairs_are_encoded_as_lm_eval_does(ours, context, continuation):
    (found,) = encode_pairs(ours._encode, [(context, continuation)], ours.eot_token_id)
    if context.strip():
        before, after = ours._encode_pair(context, continuation)
    else:
        before, after = [ours.eot_token_id], ours.tok_encode(context + continuation)
    assert found.context.tolist() == before
    assert found.continuation.tolist() == after


def test_a_continuation_that_begins_with_the_end_of_a_document_is_its_own_context(ours):
    def encode(texts):
        return [np.array([ours.eot_token_id, 5] if text else [], np.int32) for text in texts]

    (found,) = encode_pairs(encode, [("", "x")], ours.eot_token_id)
    assert found.context.tolist() == [ours.eot_token_id]
    assert found.continuation.tolist() == [5]


def test_contexts_that_are_alike_are_one_array(ours):
    one, other = encode_pairs(ours._encode, [("Who?", " I"), ("Who?", " you")], 0)
    assert one.context is other.context


def test_what_was_asked_is_counted_and_told_apart(ours):
    digests = []
    for answer in (" a lamp", " a lamp", " a clock"):
        ours.new_tally("")
        ours.loglikelihood(instances("loglikelihood", (CONTEXTS[0], answer)))
        digests.append(ours.tally.digest.hexdigest())
        assert ours.tally.requests == 1
        assert ours.tally.flops > 0
    assert digests[0] == digests[1] != digests[2]
