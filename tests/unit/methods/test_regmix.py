"""--method regmix, from a swarm or from the user's tables to mixture.json."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from megatron_chameleon.artifacts import Mixture, MixtureWarning
from megatron_chameleon.artifacts.swarm import SwarmRecord
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.regmix import RegmixOptions, TreeOptions
from megatron_chameleon.methods.regmix.compute import (
    check_lightgbm,
    check_number_of_runs,
    compute_regmix,
)
from megatron_chameleon.methods.swarm.options import MixtureSamplingOptions
from tests.small_corpus import DOMAINS
from tests.unit.methods.fit_runs import SWARM, make_options, sampled_runs

QUICK = TreeOptions(num_trees=100, tree_learning_rate=0.1, num_draws=3000, num_best=30)
BEST = np.array([0.6, 0.3, 0.1])


def runs(count=80):
    """Runs whose losses are smallest near BEST."""

    def losses_of(mixtures):
        return 2 + ((mixtures - BEST) ** 2).sum(axis=1, keepdims=True) * [1.0, 0.8, 1.2]

    return sampled_runs(losses_of, count)


@pytest.fixture
def compute(corpus, tmp_path):
    """``compute(runs, **changes)``: the mixture."""

    def run(existing=None, **changes):
        settings = {"trees": QUICK, **changes}
        options = make_options(RegmixOptions, corpus, tmp_path, existing, settings)
        assert compute_regmix(options)
        return Mixture.load(options.output)

    return run


def test_the_best_mixture_of_existing_runs_is_found(compute):
    mixture = compute(runs())
    assert mixture.method == "regmix"
    assert list(mixture.weights.values()) == pytest.approx(BEST, abs=0.08)
    assert sum(mixture.weights.values()) == pytest.approx(1)
    assert mixture.cost.flops == 0
    assert mixture.cost.wall_seconds > 0
    fit = mixture.parameters["fit"]
    assert fit["measured_by"] == "5-fold cross-validation"
    for name in DOMAINS:
        assert fit["spearman"][name] > fit["linear_spearman"][name] > 0
        assert fit["mae"][name] < fit["linear_mae"][name]


def test_the_target_determines_the_mixture(compute):
    existing = runs()
    centres = np.eye(3) * 0.6 + 0.1
    losses = 2 + ((existing.mixtures[:, None] - centres) ** 2).sum(axis=2)
    existing = dataclasses.replace(existing, losses=losses)
    for name in DOMAINS:
        mixture = compute(existing, target=name)
        assert max(mixture.weights, key=mixture.weights.__getitem__) == name
    mixture = compute(existing, target="news=3,poems=1")
    assert mixture.parameters["target_shares"] == {"news": 0.75, "code": 0, "poems": 0.25}
    assert mixture.weights["news"] > mixture.weights["poems"] > mixture.weights["code"]


def test_a_domain_without_text_in_the_runs_gets_no_weight(compute):
    existing = runs()
    pairs = existing.mixtures[:, :2] / existing.mixtures[:, :2].sum(axis=1, keepdims=True)
    two = dataclasses.replace(existing, domains=["news", "code"], mixtures=pairs)
    with pytest.warns(MixtureWarning, match="poems"):
        assert compute(two).weights["poems"] == 0


def test_an_extrapolated_mixture_gives_a_warning(compute):
    existing = runs()
    near = 0.2 + 0.4 * existing.mixtures
    losses = 3 - near[:, [0]] * [1.0, 1.0, 1.0]
    with pytest.warns(MixtureWarning, match="nearest run"):
        mixture = compute(dataclasses.replace(existing, mixtures=near, losses=losses))
    assert mixture.parameters["reach"]["extrapolates"]
    assert "news" in mixture.parameters["reach"]["outside_range"]


def test_the_epoch_limit_holds(compute, corpus):
    budget = 2 * sum(corpus.train_tokens.values())
    free = compute(runs(), token_budget=budget)
    with pytest.warns(MixtureWarning, match="news"):
        limited = compute(runs(), token_budget=budget, max_epochs=3.0)
    assert max(free.epochs.values()) > 3 >= max(limited.epochs.values()) - 1e-9
    assert limited.unconstrained == pytest.approx(free.weights)
    assert limited.parameters["predicted_losses"] != free.parameters["predicted_losses"]


def test_a_swarm_is_trained_fitted_and_costed(compute, tmp_path, capsys):
    sampling = MixtureSamplingOptions(smallest_weight=0.05)
    mixture = compute(num_proxies=10, sampling=sampling)
    swarm = tmp_path / "out" / "mixture" / "swarm"
    assert {path.name for path in swarm.glob("*.csv")} == {"ratios.csv", "metrics.csv"}
    assert mixture.parameters["runs"] == 10
    assert mixture.cost.flops == 0
    assert mixture.parameters["total_cost"]["flops"] == SwarmRecord.load(swarm).cost.flops > 1e8
    assert mixture.parameters["made_from"] == ["mixture/swarm"]
    tokens = SWARM.train_iters * SWARM.global_batch_size * SWARM.seq_length
    paper_flops = 6 * (12 * 4 * 64**2) * tokens * 10  # 6 N D of ten nano proxies
    assert mixture.parameters["paper_flops"] == pytest.approx(paper_flops)

    again = compute(num_proxies=10, sampling=sampling)
    assert "swarm: 0 of 10 members" in capsys.readouterr().out
    assert again.weights == mixture.weights
    assert again.parameters["total_cost"]["flops"] == mixture.parameters["total_cost"]["flops"]

    tables = {"ratios": swarm / "ratios.csv", "metrics": swarm / "metrics.csv"}
    fitted = compute(output=tmp_path / "again.json", **tables)
    assert fitted.weights == pytest.approx(mixture.weights, abs=1e-9)
    assert fitted.parameters["unknown_costs"] == [f"the runs of {swarm / 'ratios.csv'}"]
    assert not {"total_cost", "paper_flops"} & set(fitted.parameters)


@pytest.mark.parametrize(
    ("changes", "identifier"),
    [
        ({"num_best": 9999}, "--num-best 9999"),
        ({"folds": 1}, "--folds 1"),
        ({"num_trees": 0}, "--num-trees 0"),
        ({"tree_learning_rate": 2.0}, "--tree-learning-rate 2"),
    ],
)
def test_tree_options_out_of_range_are_rejected(changes, identifier):
    with pytest.raises(UserError, match=identifier):
        dataclasses.replace(QUICK, **changes)


def test_too_few_runs_are_rejected(compute):
    with pytest.raises(UserError, match="4 runs"):
        compute(runs(count=4))
    with pytest.raises(UserError, match="30 runs"):
        check_number_of_runs(dataclasses.replace(QUICK, min_runs_in_leaf=20), 30)
    check_number_of_runs(dataclasses.replace(QUICK, min_runs_in_leaf=20), 50)


def test_a_missing_library_is_a_user_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(UserError, match="pip install lightgbm"):
        check_lightgbm()

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == "lightgbm":
                raise OSError("libgomp.so.1: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "lightgbm")
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(UserError, match="libgomp1"):
        check_lightgbm()
