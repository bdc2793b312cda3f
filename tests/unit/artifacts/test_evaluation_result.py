"""Held-out losses: standard errors, against direct formulas and samples."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import (
    Clusters,
    DomainLoss,
    EvaluationResult,
    Protocol,
    require_comparable,
)
from megatron_chameleon.artifacts.evaluation_result import ratio_standard_error
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import sample_result

CLUSTERS = st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(1, 50)), min_size=2, max_size=20)


def plain_error(sums: list[float], sizes: list[int]) -> float:
    mean = sum(sums) / sum(sizes)
    squares = sum((s - mean * n) ** 2 for s, n in zip(sums, sizes, strict=True))
    return math.sqrt(len(sums) / (len(sums) - 1) * squares) / sum(sizes)


@given(CLUSTERS)
def test_standard_error_of_a_ratio_matches_the_plain_formula(clusters):
    sums, sizes = zip(*clusters, strict=True)
    expected = plain_error(list(sums), list(sizes))
    assert ratio_standard_error(sums, sizes) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert ratio_standard_error(sums[:1], sizes[:1]) is None


def domain(losses: list[float], tokens: list[int]) -> DomainLoss:
    mean = sum(losses) / sum(tokens)
    return DomainLoss(mean, sum(tokens), 5.0, clusters=Clusters(losses, tokens))


def result(domains: dict[str, DomainLoss]) -> EvaluationResult:
    return dataclasses.replace(sample_result(), domains=domains)


def test_mean_perplexity_and_bits_per_byte_match_direct_formulas():
    clusters = Clusters([10.0, 12.0, 9.0], [5, 5, 5], [20, 30, 25])
    domains = {"a": DomainLoss(1.0, 10**6, 5.0), "b": DomainLoss(31 / 15, 15, 5.0, 75, clusters)}
    found = result(domains)
    assert found.mean_perplexity == pytest.approx((math.exp(1) + math.exp(31 / 15)) / 2)
    assert found.mean_perplexity_error is None  # domain 'a' has no clusters, which errors need
    assert domains["b"].bits_per_byte == pytest.approx(31 / math.log(2) / 75)
    expected = plain_error([10.0, 12.0, 9.0], [20, 30, 25]) / math.log(2)
    assert domains["b"].bits_per_byte_error == pytest.approx(expected)
    assert domains["a"].bits_per_byte is None


def test_only_results_of_one_corpus_and_protocol_are_comparable():
    same = dataclasses.replace(sample_result(), step=7, checkpoint_hash="x")
    results = {"a": sample_result(), "b": same}
    require_comparable(results)
    for name, value in (("corpus_hash", "x"), ("protocol", Protocol("test", 32, max_tokens=1000))):
        other = dataclasses.replace(same, **{name: value})  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"'c'.*(corpora|split)"):
            require_comparable(results | {"c": other})
