"""Hooks, DoReMi, DoGE, online Chameleon and discovery find in every layout what one rank finds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from megatron_chameleon.artifacts import Corpus, Mixture, TrainingRun
from megatron_chameleon.artifacts.discovered import DiscoveredDomains
from tests.distributed.cases import (
    DISCOVERING,
    DOGE,
    DOGE_AGAIN,
    DOREMI,
    DOREMI_AGAIN,
    HOOKED,
    HOOKED_AGAIN,
    ONLINE,
    ONLINE_AGAIN,
    ONLINE_INTERVAL,
    TRAIN_ITERS,
    Again,
    each,
    one_rank,
)
from tests.small_corpus import DOMAINS

TOLERANCE, DOGE_TOLERANCE = 5e-6, 1e-5


def others(names: Any, again: Again | None = None) -> list[Any]:
    """Return all but the sections of one rank that the others repeat."""
    return each(name for name in (*names, *(again or {})) if name != one_rank(name))


def series(lines: list[dict[str, Any]], *of_hook: str) -> dict[str, np.ndarray]:
    """Values by step of loss, gradient norm and fields of the hook."""
    found: dict[str, Any] = {name: [line[name] for line in lines] for name in ("loss", "grad_norm")}
    for field in of_hook:
        values = [line["hook"][field] for line in lines]
        found[field] = [list(v.values()) if isinstance(v, dict) else v for v in values]
    return {name: np.array(values) for name, values in found.items()}


def assert_near(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = TOLERANCE
) -> None:
    for name, values in expected.items():
        assert len(values) == TRAIN_ITERS
        np.testing.assert_allclose(found[name], values, tolerance, tolerance, err_msg=name)


@pytest.mark.parametrize("run", others(HOOKED, HOOKED_AGAIN))
def test_a_hook_decides_and_trains_as_on_one_rank(results, run):
    found, expected = (series(results.metrics(n), "weights") for n in (run, one_rank(run)))
    assert_near(found, expected)


@pytest.mark.parametrize("hook", ["weigher", "combiner", "changer"])
def test_a_hooks_decisions_change_the_run(results, hook):
    found = series(results.metrics(f"{hook}-one"), "weights")
    assert np.ptp(found["weights"][-1]) > 0.01
    assert len(np.unique(found["weights"][:, 0])) == TRAIN_ITERS
    if hook != "changer":
        plain = series(results.metrics("one"))
        assert np.abs(found["loss"] - plain["loss"]).max() > 1e-3
        return
    phases = results.run("changer-one").mixture_phases
    assert [phase.first_sample for phase in phases] == [0, 4 * 8, 8 * 8]
    changed = np.array([list(phase.weights.values()) for phase in phases[1:]])
    np.testing.assert_allclose(changed, found["weights"][[3, 7]], atol=1e-6)
    assert np.ptp(changed[1]) > 0.01


@pytest.mark.parametrize("run", each(HOOKED))
def test_every_rank_counts_the_hooks_cost(results, run):
    flops = results.metrics(run)[-1]["hook"]["flops"]
    hook, case = HOOKED[run]
    files = list(results.places.hook_flops(run).iterdir())
    assert len(files) == case.ranks
    assert {json.loads(file.read_text()) for file in files} == {flops}
    if hook == "combiner" and case.parallel.pipeline_model_parallel_size == 1:
        assert flops == 0
    if run == "combiner-vpp2":  # two micro-batches of one size for three samples of a domain
        assert flops > 0
    if run == "weigher-one":  # a forward pass of every step's batch: a third of training
        plain = results.run("one").cost.flops
        assert results.run(run).cost.flops == pytest.approx(plain + flops)
        assert flops == pytest.approx(plain / 3)


def phases_of(run: TrainingRun) -> tuple[list[int], np.ndarray]:
    """First samples of the mixtures, and their weights."""
    phases = run.mixture_phases
    return [p.first_sample for p in phases], np.array([list(p.weights.values()) for p in phases])


@pytest.mark.parametrize("run", others(ONLINE, ONLINE_AGAIN))
def test_online_weights_are_those_of_one_rank(results, run):
    found, expected = results.run(run), results.run("online-one")
    starts, weights = phases_of(found)
    expected_starts, expected_weights = phases_of(expected)
    assert starts == expected_starts
    np.testing.assert_allclose(weights, expected_weights, atol=TOLERANCE)
    lines, wanted = results.metrics(run), results.metrics("online-one")
    assert_near(series(lines), series(wanted))
    sampled = [[line["domain_tokens_drawn"] for line in each] for each in (lines, wanted)]
    assert sampled[0] == sampled[1]
    if run in ONLINE:
        assert found.cost.flops == expected.cost.flops


def test_online_weights_move_at_every_interval(results):
    starts, weights = phases_of(results.run("online-one"))
    assert starts == [step * 8 for step in range(0, TRAIN_ITERS, ONLINE_INTERVAL)]
    assert np.abs(np.diff(weights, axis=0)).max(axis=1).min() > 0.005


def mixture(results: Any, name: str) -> Mixture:
    results.require(name)
    return Mixture.load(results.places.run(name) / "mixture.json")


def doremi_series(results: Any, name: str) -> dict[str, np.ndarray]:
    return series(list(results.proxy(name).metrics()), "weights", "mean_weights", "excess")


@pytest.mark.parametrize("name", others(DOREMI, DOREMI_AGAIN))
def test_doremi_finds_the_weights_of_one_rank(results, name):
    one = one_rank(name)
    assert_near(doremi_series(results, name), doremi_series(results, one))
    found, expected = mixture(results, name), mixture(results, one)
    assert found.weights == pytest.approx(expected.weights, abs=TOLERANCE)
    if name in DOREMI:
        assert results.proxy(name).cost.flops == results.proxy(one).cost.flops
    runs = [TrainingRun.load(results.places.run(name) / p) for p in found.parameters["made_from"]]
    assert found.parameters["total_cost"]["flops"] == sum(run.cost.flops for run in runs)


def test_doremis_weights_move_and_change_the_training(results):
    plain = series(results.metrics("one"))
    for name in ("doremi-one", "doremi-one-masked", "doremi-one-fork"):
        found = doremi_series(results, name)
        assert np.ptp(found["weights"][-1]) > 0.01
        assert len(np.unique(found["weights"][:, 0])) == TRAIN_ITERS
        assert np.abs(found["loss"] - plain["loss"]).max() > 1e-3
    # The fork clips other values, with the same step size.
    variants = [doremi_series(results, f"doremi-one-{kind}") for kind in ("masked", "fork")]
    assert np.abs(variants[0]["excess"] - variants[1]["excess"]).max() > 1e-3


@pytest.mark.parametrize("name", others(DOGE, DOGE_AGAIN))
def test_doge_finds_the_weights_of_one_rank(results, name):
    one = one_rank(name)
    found, expected = mixture(results, name), mixture(results, one)
    assert found.weights == pytest.approx(expected.weights, abs=DOGE_TOLERANCE)
    assert found.scores == pytest.approx(expected.scores, abs=10 * DOGE_TOLERANCE)
    proxies = results.proxy(name), results.proxy(one)
    lines, wanted = (series(list(proxy.metrics()), "weights") for proxy in proxies)
    assert_near(lines, wanted, DOGE_TOLERANCE)
    if name in DOGE:
        flops, plain = (proxy.cost.flops for proxy in proxies)
        if DOGE[name].parallel.pipeline_model_parallel_size == 1:
            assert flops == plain
        else:  # it fills micro-batches up
            assert plain <= flops < 1.4 * plain
        if name in ("doge-pp2", "doge-towards-vpp2"):  # three samples in two micro-batches
            assert flops > plain


@pytest.mark.parametrize("name", ["doge-one", "doge-towards-one"])
def test_doges_weights_move(results, name):
    weights = [weight for weight in mixture(results, name).weights.values() if weight]
    assert len(weights) == len(DOMAINS) - ("towards" in name)
    assert max(weights) - min(weights) > 0.01


@pytest.mark.parametrize("name", others(DISCOVERING))
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
    assert other.cost.num_devices == DISCOVERING[name].ranks
    assert other.cost.flops == one.cost.flops
