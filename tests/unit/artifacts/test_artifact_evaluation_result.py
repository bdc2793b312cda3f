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


def test_perplexity_is_the_exponential_of_the_loss():
    domain = DomainLoss(loss=2.0, tokens=10, unigram_loss=3.0)
    assert domain.perplexity == math.exp(2.0)
    assert domain.unigram_perplexity == math.exp(3.0)


@given(st.floats(0, 1e6))
def test_perplexity_is_infinite_where_no_float_holds_it(loss):
    perplexity = DomainLoss(loss, 10, loss).perplexity
    assert perplexity == (math.exp(loss) if loss < 709.7 else math.inf) or 709.7 < loss < 709.8


def test_the_mean_is_over_domains_and_not_over_tokens():
    domains = {"a": DomainLoss(1.0, 1_000_000, 5.0), "b": DomainLoss(3.0, 10, 5.0)}
    result = dataclasses.replace(sample_result(), domains=domains)
    assert result.mean_perplexity == pytest.approx((math.exp(1) + math.exp(3)) / 2)


def test_results_of_one_protocol_and_corpus_can_be_compared():
    results = {
        name: dataclasses.replace(sample_result(), checkpoint_hash=name, step=step)
        for step, name in enumerate("abc")
    }
    require_comparable(results)
    require_comparable({"alone": sample_result()})


def test_results_on_different_corpora_are_refused():
    other = dataclasses.replace(sample_result(), corpus_hash="x")
    with pytest.raises(UserError, match="'third' and 'first' were evaluated on different corpora"):
        require_comparable({"first": sample_result(), "second": sample_result(), "third": other})


@pytest.mark.parametrize(
    ("protocol", "told"),
    [
        (Protocol("test", 32, max_tokens=1000), "split test and valid"),
        (Protocol("valid", 64, max_tokens=1000), "window_length 64 and 32"),
        (Protocol("valid", 32, max_tokens=None), "max_tokens None and 1000"),
        (
            Protocol("valid", 32, "documents", max_tokens=1000, first_token="after-eod"),
            "packing documents and packed, first_token after-eod and not-scored",
        ),
        (Protocol("valid", 32, max_tokens=1000, overlap=8), "overlap 8 and 0"),
        (
            Protocol("valid", 32, max_tokens=1000, end_of_document=False),
            "end_of_document False and True",
        ),
    ],
)
def test_results_of_different_protocols_are_refused_with_what_differs(protocol, told):
    other = dataclasses.replace(sample_result(), protocol=protocol)
    with pytest.raises(UserError) as refused:
        require_comparable({"a": sample_result(), "b": other})
    assert str(refused.value) == (
        f"'b' and 'a' were evaluated by different protocols ({told}); evaluate both by one"
    )


@pytest.mark.parametrize("field", ["loss", "unigram_loss"])
def test_a_loss_that_is_no_number_is_refused_with_its_place(tmp_path, field):
    path = tmp_path / "result.json"
    sample_result().save(path)
    body = json.loads(path.read_text(encoding="utf-8"))
    name = list(body["domains"])[-1]
    del body["checksum"]
    body["domains"][name][field] = math.nan
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(UserError) as refused:
        EvaluationResult.load(path)
    assert str(refused.value).startswith(f"{path}: field domains.{name}.{field}: ")
    body["domains"][name][field] = 800.0
    path.write_text(json.dumps(body), encoding="utf-8")
    assert getattr(EvaluationResult.load(path).domains[name], field) == 800.0


def test_bits_per_byte_are_nats_over_the_bytes_of_the_text():
    domain = DomainLoss(loss=2.0, tokens=10, unigram_loss=3.0, text_bytes=40)
    assert domain.bits_per_byte == pytest.approx(20 / math.log(2) / 40)
    assert DomainLoss(2.0, 10, 3.0).bits_per_byte is None


def test_errors_are_none_where_no_clusters_were_kept():
    domain = DomainLoss(2.0, 10, 3.0, 40)
    assert domain.loss_error is domain.perplexity_error is domain.bits_per_byte_error is None
    result = dataclasses.replace(sample_result(), domains={"a": domain})
    assert result.mean_perplexity_error is None
