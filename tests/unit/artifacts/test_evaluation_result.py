from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import DomainLoss, EvaluationResult, Protocol, require_comparable
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import sample_result


@given(st.floats(0, 1e6))
def test_perplexity_is_exp_of_the_loss_or_infinite(loss):
    perplexity = DomainLoss(loss, 10, loss).perplexity
    assert perplexity == (math.exp(loss) if loss < 709.7 else math.inf) or 709.7 < loss < 709.8


def test_mean_perplexity_is_over_domains():
    domains = {"a": DomainLoss(1.0, 1_000_000, 5.0), "b": DomainLoss(3.0, 10, 5.0)}
    result = dataclasses.replace(sample_result(), domains=domains)
    assert result.mean_perplexity == pytest.approx((math.exp(1) + math.exp(3)) / 2)
    assert result.mean_perplexity_error is None  # no clusters


def test_bits_per_byte():
    domain = DomainLoss(loss=2.0, tokens=10, unigram_loss=3.0, text_bytes=40)
    assert domain.bits_per_byte == pytest.approx(20 / math.log(2) / 40)
    assert DomainLoss(2.0, 10, 3.0).bits_per_byte is None


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"step": 7, "checkpoint_hash": "x"}, []),
        ({"corpus_hash": "x"}, ["corpora"]),
        ({"protocol": Protocol("test", 64, max_tokens=1000)}, ["split", "window_length"]),
        (
            {"protocol": Protocol("valid", 32, "documents", False, None, 8, "after-eod")},
            ["packing", "end_of_document", "max_tokens", "overlap", "first_token"],
        ),
    ],
)
def test_only_results_of_one_corpus_and_protocol_are_comparable(changes, names):
    other = dataclasses.replace(sample_result(), **changes)
    results = {"a": sample_result(), "b": sample_result(), "c": other}
    if not names:
        require_comparable(results)
        return
    with pytest.raises(UserError) as rejected:
        require_comparable(results)
    assert all(name in str(rejected.value) for name in ["'c'", *names])
    assert len(str(rejected.value).split("(")[-1].split(", ")) == len(names)


@pytest.mark.parametrize("field", ["loss", "unigram_loss"])
def test_loss_that_is_not_finite_is_rejected(tmp_path, field):
    path = tmp_path / "result.json"
    sample_result().save(path)
    body = json.loads(path.read_text(encoding="utf-8"))
    del body["checksum"]
    body["domains"]["b"][field] = math.nan
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(UserError, match=rf"field domains\.b\.{field}: "):
        EvaluationResult.load(path)
    body["domains"]["b"][field] = 800.0
    path.write_text(json.dumps(body), encoding="utf-8")
    assert getattr(EvaluationResult.load(path).domains["b"], field) == 800.0
