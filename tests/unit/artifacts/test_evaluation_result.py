"""Held-out losses: standard errors and paired differences, against direct formulas and samples."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import (
    Clusters,
    DomainLoss,
    EvaluationResult,
    Protocol,
    loss_difference,
    mean_perplexity_difference,
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


def domain(losses: list[float], tokens: list[int]) -> DomainLoss:
    mean = sum(losses) / sum(tokens)
    return DomainLoss(mean, sum(tokens), 5.0, clusters=Clusters(losses, tokens))


def result(domains: dict[str, DomainLoss]) -> EvaluationResult:
    return dataclasses.replace(sample_result(), domains=domains)


@given(CLUSTERS, st.lists(st.floats(0, 100), min_size=20, max_size=20))
def test_paired_difference_has_the_error_of_the_differences(clusters, other):
    losses, tokens = (list(values) for values in zip(*clusters, strict=True))
    first, second = domain(losses, tokens), domain(other[: len(losses)], tokens)
    found = loss_difference(first, second)
    differences = [a - b for a, b in zip(losses, other, strict=False)]
    assert found.value == first.loss - second.loss
    assert found.error == pytest.approx(plain_error(differences, tokens), rel=1e-6, abs=1e-9)


def test_error_of_a_mean_perplexity_difference_matches_samples():
    rng = np.random.default_rng(2)
    tokens = [10] * 50
    found = []
    for _ in range(1000):
        draws = [
            [domain((10 * rng.normal(level, 0.2, 50)).tolist(), tokens) for level in (2.0, 3.0)]
            for _ in range(2)
        ]
        pair = [result(dict(zip("ab", domains, strict=True))) for domains in draws]
        found.append(mean_perplexity_difference(*pair))
    errors = [difference.error for difference in found]
    assert np.std([d.value for d in found]) == pytest.approx(np.mean(errors), rel=0.1)  # type: ignore[arg-type]


def test_single_cluster_other_text_or_overflow_gives_no_error():
    assert ratio_standard_error([3.0], [2]) is None
    first = domain([1.0, 2.0], [3, 4])
    beyond = domain([7000.0, 7000.0], [3, 4])  # its perplexity overflows
    for other in (domain([1.0, 2.0], [4, 3]), DomainLoss(1.0, 7, 5.0), beyond):
        found = mean_perplexity_difference(result({"a": first}), result({"a": other}))
        assert found.error is None


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
