"""--freeze: an earlier mixture is one domain of a smaller swarm."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_chameleon.artifacts import Mixture, TrainingRun
from megatron_chameleon.artifacts.swarm import SwarmRecord
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange.mixture_runs import write_mixture_runs
from megatron_chameleon.methods.mixing_laws import MixingLawsOptions
from megatron_chameleon.methods.mixing_laws.compute import MixingLawsFit
from megatron_chameleon.methods.regmix import RegmixOptions
from megatron_chameleon.methods.regmix.compute import Regmix
from megatron_chameleon.methods.surrogate import SurrogateOptions
from megatron_chameleon.methods.surrogate.compute import SurrogateFit
from megatron_chameleon.methods.swarm import CollectOptions, GenerateOptions
from megatron_chameleon.methods.swarm.any_trainer import collect_swarm, generate_swarm
from megatron_chameleon.methods.swarm.space import SearchSpace
from tests.small_corpus import DOMAINS
from tests.unit.methods.swarm.test_fit import (
    ACCEPTING,
    FEW,
    LAWS,
    SAMPLING,
    SWARM,
    TREES,
    TRUE,
    bowls,
    runs_of,
)

OLD = {"news": 0.75, "code": 0.25}
RATIOS = np.array([0.75, 0.25, 0.0])
POEMS = np.array([0.0, 0.0, 1.0])


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "old.json"
    Mixture(OLD).save(path)
    return path


def on_the_line(shares):
    """Mixtures [n, 3] in which the frozen mixture has ``shares`` [n]."""
    return shares[:, None] * RATIOS + (1 - shares[:, None]) * POEMS


@pytest.fixture
def fit(corpus, old, tmp_path):
    """``fit(method, options_type, losses_of, **changes)``: a mixture fitted to known losses."""

    def run(method, options_type, losses_of, **changes):
        mixtures = on_the_line(np.random.default_rng(0).uniform(size=60))
        runs = dataclasses.replace(runs_of(bowls, 60), mixtures=mixtures)
        runs = dataclasses.replace(runs, losses=losses_of(mixtures))
        tables = {"ratios": tmp_path / "ratios.csv", "metrics": tmp_path / "metrics.csv"}
        write_mixture_runs(runs, **tables)
        settings = {"corpus": corpus.root, "output": tmp_path / "mixture.json", "freeze": old}
        method(options_type(**settings, **tables, fallback=ACCEPTING, **changes)).compute()
        return Mixture.load(tmp_path / "mixture.json")

    return run


METHODS = [
    (Regmix, RegmixOptions, bowls, {"trees": TREES}, 0.05),
    (MixingLawsFit, MixingLawsOptions, TRUE.predict, {"laws": LAWS}, 0.01),
    (SurrogateFit, SurrogateOptions, bowls, {"optimum": FEW}, 0.03),
]


@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
@pytest.mark.parametrize(("method", "options_type", "losses_of", "settings", "error"), METHODS)
def test_a_fit_finds_the_best_mixture_with_the_frozen_ratios(
    fit, corpus, method, options_type, losses_of, settings, error
):
    """The epoch limit, which holds for each frozen domain, is below the weight of the optimum."""
    limit = {"token_budget": 10 * corpus.train_tokens["news"], "max_epochs": 6.0}
    mixture = fit(method, options_type, losses_of, target="news=19,poems=1", **settings, **limit)
    grid = np.linspace(0, 1, 10_001)
    best = grid[(losses_of(on_the_line(grid)) @ [0.95, 0, 0.05]).argmin()]
    free = mixture.unconstrained
    assert free
    assert free["news"] == pytest.approx(3 * free["code"], rel=1e-12)
    assert free["news"] + free["code"] == pytest.approx(best, abs=error)
    assert sum(free.values()) == pytest.approx(1)
    assert mixture.epochs
    assert mixture.epochs["news"] == pytest.approx(6)
    assert mixture.capped == ["news"]
    assert mixture.weights["news"] == pytest.approx(3 * mixture.weights["code"], rel=1e-12)
    assert mixture.parameters["frozen"]["mixture"] == Mixture(OLD).hash
    assert mixture.provenance
    assert mixture.provenance.inputs["frozen mixture"] == Mixture(OLD).hash
    searched = mixture.parameters["frozen"]["searched_weights"]
    assert searched == pytest.approx({"frozen": 0.8, "poems": 0.2})


def test_a_swarm_over_a_frozen_mixture_is_generated_trained_and_fitted(
    corpus, old, tmp_path, capsys
):
    folder = tmp_path / "work" / "swarm"
    shared = {"corpus": corpus.root, "freeze": old, "num_proxies": 6, "swarm": SWARM}
    generate_swarm(GenerateOptions(**shared, swarm_dir=folder, sampling=SAMPLING))
    record = SwarmRecord.load(folder)
    assert record.frozen_mixture == Mixture(OLD).hash
    mixtures = np.array(record.mixtures)
    np.testing.assert_allclose(mixtures[:, 0], 3 * mixtures[:, 1], rtol=1e-12)
    assert len(np.unique(mixtures[:, 2])) == 6
    options = {**shared, "output": tmp_path / "m.json", "work_dir": folder.parent}
    with pytest.raises(UserError, match="--seed-noise"):
        RegmixOptions(**options, seed_noise="0.1")
    assert not Regmix(RegmixOptions(**options, sampling=SAMPLING, trees=TREES)).needs_no_proxy()
    assert "no gain is predicted with --freeze" in capsys.readouterr().out
    fitted = Regmix(RegmixOptions(**options, sampling=SAMPLING, trees=TREES, fallback=ACCEPTING))
    assert fitted.compute()
    assert TrainingRun.load(folder / "members" / "00000").domain_tokens.keys() == set(DOMAINS)
    mixture = Mixture.load(options["output"])
    assert mixture.weights["news"] == pytest.approx(3 * mixture.weights["code"], rel=1e-12)
    tables = {"ratios": folder / "ratios.csv", "metrics": folder / "metrics.csv"}
    with pytest.raises(UserError, match="pass this mixture as --freeze"):
        Regmix(RegmixOptions(corpus=corpus.root, output=tmp_path / "n.json", **tables)).compute()
    capsys.readouterr()
    collect_swarm(CollectOptions(swarm_dir=folder))
    assert "--freeze" in capsys.readouterr().out
    with pytest.raises(UserError, match="--freeze"):  # the same folder without the frozen mixture
        generate_swarm(GenerateOptions(**{**shared, "freeze": None}, swarm_dir=folder))


def test_later_rounds_keep_the_frozen_ratios(corpus, old, tmp_path):
    options = RegmixOptions(
        corpus=corpus.root,
        output=tmp_path / "m.json",
        freeze=old,
        num_proxies=16,
        sampling=SAMPLING,
        swarm=dataclasses.replace(SWARM, rounds=2),
    )
    method = Regmix(options)
    first = method.first_mixtures()
    table = dataclasses.replace(runs_of(bowls, 8), mixtures=first, losses=bowls(first))
    mixtures = method.with_next_round(first, table)
    assert len(first) == 8
    assert len(np.unique(mixtures.round(9), axis=0)) == len(mixtures) == 16
    np.testing.assert_allclose(mixtures[:, 0], 3 * mixtures[:, 1], rtol=1e-9)
    np.testing.assert_array_equal(mixtures[:8], first)
    grid = np.linspace(0, 1, 1001)
    best = grid[bowls(on_the_line(grid)).mean(axis=1).argmin()]
    later = mixtures[8:, :2].sum(axis=1)
    assert np.abs(later - best).mean() < np.abs(first[:, :2].sum(axis=1) - best).mean()


def test_runs_and_priors_must_have_the_frozen_ratios():
    """Half of 600 frozen domains are missing in a run, each by less than a rounding error."""
    frozen = Mixture(dict.fromkeys(map(str, range(600)), 1 / 600))
    ratios = np.zeros((2, 601))
    ratios[0, :600], ratios[1, 600] = 1 / 600, 1
    space = SearchSpace(["frozen", "new"], ratios, ratios > 0, np.ones(601), frozen)
    run = np.full(601, 0.5 / 600)
    run[600] = 0.5
    np.testing.assert_allclose(space.of_runs(["0"], run[None]), [[0.5, 0.5]])
    run[:300], run[300:600] = 0, 0.5 / 300
    with pytest.raises(UserError, match="run 0"):
        space.of_runs(["0"], run[None])
    space.ratios[0, :600] = np.eye(600)[0]
    with pytest.raises(UserError, match="--prior"):
        space.project(np.eye(601)[1])


@pytest.mark.parametrize(
    ("weights", "identifier"),
    [
        ({"songs": 1.0}, "songs"),
        ({"news": 0.0}, "all zero"),
        (dict.fromkeys(DOMAINS, 1 / 3), "add a new domain"),
    ],
)
def test_a_mixture_that_cannot_be_frozen_is_rejected(corpus, tmp_path, weights, identifier):
    path = tmp_path / "old.json"
    Mixture(weights).save(path)
    with pytest.raises(UserError, match=identifier):
        generate_swarm(
            GenerateOptions(
                corpus=corpus.root,
                swarm_dir=tmp_path / "s",
                num_proxies=4,
                freeze=path,
                swarm=SWARM,
            )
        )
    assert not (tmp_path / "s").exists()
