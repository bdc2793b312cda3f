"""Our lm-eval model compared with lm-eval's own on the exported checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.checkpoint.load import open_reader
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.evaluation.lm_eval_model import ScorerLM
from megatron_chameleon.evaluation.scoring import Prompt, Scorer
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
    return ScorerLM(Scorer(open_reader(record, one_rank), 2, tokenizer))


@pytest.fixture(scope="module")
def theirs(text_checkpoint):
    return HFLM(str(text_checkpoint.exported), device="cpu", dtype="float32", batch_size=4)


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
    # A text has up to two windows, each within the tolerance.
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
