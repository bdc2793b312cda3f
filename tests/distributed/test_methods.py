"""DoReMi, DoGE, online methods and discovery give the same result in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_chameleon.artifacts import Corpus, EmbeddingStore, Mixture, TrainingRun
from megatron_chameleon.artifacts.discovered import DiscoveredDomains
from tests.distributed import cases
from tests.distributed.cases import Again
from tests.small_corpus import DOMAINS

TOLERANCE, DOGE_TOLERANCE = 5e-6, 1e-5


def others(names: Any, again: Again | None = None) -> list[Any]:
    """Return all sections except the one-rank references."""
    return [name for name in (*names, *(again or {})) if name != cases.one_rank(name)]


def series(lines: list[dict[str, Any]], *of_hook: str) -> dict[str, np.ndarray]:
    """Values per step of the loss, the gradient norm, and fields that the hook logs."""
    found: dict[str, Any] = {name: [line[name] for line in lines] for name in ("loss", "grad_norm")}
    for field in of_hook:
        values = [line["hook"][field] for line in lines]
        found[field] = [list(v.values()) if isinstance(v, dict) else v for v in values]
    return {name: np.array(values) for name, values in found.items()}


def assert_near(
    found: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    steps: int,
    tolerance: float = TOLERANCE,
) -> None:
    for name, values in expected.items():
        assert len(values) == steps
        np.testing.assert_allclose(found[name], values, tolerance, tolerance, err_msg=name)


def phases_of(run: TrainingRun) -> tuple[list[int], np.ndarray]:
    """First sample and weights of each mixture."""
    phases = run.mixture_phases
    return [p.first_sample for p in phases], np.array([list(p.weights.values()) for p in phases])


@pytest.mark.parametrize("run", others({**cases.ONLINE, **cases.RELOADED}, cases.ONLINE_AGAIN))
def test_online_weights_equal_those_of_one_rank(results, run):
    one = cases.one_rank(run)
    found, expected = results.run(run), results.run(one)
    starts, weights = phases_of(found)
    expected_starts, expected_weights = phases_of(expected)
    assert starts == expected_starts
    np.testing.assert_allclose(weights, expected_weights, atol=TOLERANCE)
    lines, wanted = results.metrics(run), results.metrics(one)
    assert_near(series(lines), series(wanted), cases.TRAIN_ITERS)
    sampled = [[line["domain_tokens_sampled"] for line in each] for each in (lines, wanted)]
    assert sampled[0] == sampled[1]
    if run in cases.ONLINE:
        assert found.cost.flops == expected.cost.flops


@pytest.mark.parametrize(("method", "least"), [("online", 0.005), ("ado", 0.01)])
def test_online_weights_change_at_every_interval(results, method, least):
    starts, weights = phases_of(results.run(f"{method}-one"))
    assert starts == [step * 8 for step in range(0, cases.TRAIN_ITERS, cases.ONLINE_INTERVAL)]
    assert np.abs(np.diff(weights, axis=0)).max(axis=1).min() > least


def test_reloaded_weights_apply_from_the_step_after_their_read(results):
    starts, weights = phases_of(results.run("reload-dp2"))
    assert starts == [0, cases.ONLINE_INTERVAL * 8]
    np.testing.assert_allclose(weights, [[1 / 3] * 3, [0.0, 0.3, 0.7]])


def mixture(results: Any, name: str) -> Mixture:
    results.require(name)
    return Mixture.load(results.places.run(name) / "mixture.json")


def doremi_series(results: Any, name: str) -> dict[str, np.ndarray]:
    return series(list(results.run(f"{name}/proxy").metrics()), "weights", "mean_weights", "excess")


@pytest.mark.parametrize("name", others(cases.DOREMI, cases.DOREMI_AGAIN))
def test_doremi_finds_the_weights_of_one_rank(results, name):
    one = cases.one_rank(name)
    assert_near(doremi_series(results, name), doremi_series(results, one), cases.PROXY_ITERS)
    found, expected = mixture(results, name), mixture(results, one)
    assert found.weights == pytest.approx(expected.weights, abs=TOLERANCE)
    weights = doremi_series(results, one)["weights"]
    assert np.ptp(weights[-1]) > 0.01
    assert len(np.unique(weights[:, 0])) == cases.PROXY_ITERS
    if name in cases.DOREMI:
        assert results.run(f"{name}/proxy").cost.flops == results.run(f"{one}/proxy").cost.flops
    runs = [TrainingRun.load(results.places.run(name) / p) for p in found.parameters["made_from"]]
    assert found.parameters["total_cost"]["flops"] == sum(run.cost.flops for run in runs)


@pytest.mark.parametrize("name", others(cases.DOGE, cases.DOGE_AGAIN))
def test_doge_finds_the_weights_of_one_rank(results, name):
    one = cases.one_rank(name)
    found, expected = mixture(results, name), mixture(results, one)
    assert found.weights == pytest.approx(expected.weights, abs=DOGE_TOLERANCE)
    assert found.scores == pytest.approx(expected.scores, abs=10 * DOGE_TOLERANCE)
    assert len(expected.weights) == len(DOMAINS)
    assert max(expected.weights.values()) - min(expected.weights.values()) > 0.01
    proxies = results.run(f"{name}/proxy"), results.run(f"{one}/proxy")
    lines, wanted = (series(list(proxy.metrics()), "weights") for proxy in proxies)
    assert_near(lines, wanted, cases.PROXY_ITERS, DOGE_TOLERANCE)
    if name in cases.DOGE:
        flops, plain = (proxy.cost.flops for proxy in proxies)
        if name == "doge-tp2-dp2-sharded":
            assert flops == plain
        else:
            # FLOPs include padding: three samples are padded to two equal micro-batches of a
            # pipeline, and a rank without a sample of a domain computes one without a loss.
            assert plain < flops < 1.5 * plain


def test_ranks_agree_that_no_proxy_is_needed(results):
    assert mixture(results, cases.NO_GAIN).parameters["written"] == "prior"
    assert not (results.places.run(cases.NO_GAIN) / "mixture").exists()


@pytest.mark.parametrize("name", others(cases.EMBEDDING))
def test_vectors_of_a_transformers_model_equal_those_of_one_rank(results, name):
    results.require("bert-one")
    results.require(name)
    one, other = (
        EmbeddingStore.load(results.places.run(each) / "embeddings") for each in ("bert-one", name)
    )
    for domain in DOMAINS:
        np.testing.assert_allclose(other.vectors(domain), one.vectors(domain), atol=TOLERANCE)
    assert other.cost.num_devices == cases.EMBEDDING[name].ranks
    assert other.cost.flops == one.cost.flops


@pytest.mark.parametrize("name", others(cases.DISCOVERING))
def test_every_document_is_in_the_cluster_that_one_rank_finds(results, name):
    results.require("discover-one")
    results.require(name)
    folders = [results.places.run(each) for each in ("discover-one", name)]
    expected, corpus = (Corpus.load(folder) for folder in folders)
    one, other = (DiscoveredDomains.load(folder) for folder in folders)
    assert corpus.names[0] == "code"
    assert len(corpus.names) > 2
    assert corpus.hash == expected.hash
    assert corpus.domains == expected.domains
    assert other.silhouettes == pytest.approx(one.silhouettes, abs=1e-5)
    assert other.cost.num_devices == cases.DISCOVERING[name].ranks
    assert other.cost.flops == one.cost.flops
