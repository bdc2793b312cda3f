"""--method mixing-laws, from swarms or from the user's tables to mixture.json."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_chameleon.artifacts import Cost, Mixture, MixtureWarning
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.mixing_laws import LawOptions, MixingLawsOptions, layer_parameters
from megatron_chameleon.methods.mixing_laws.compute import compute_mixing_laws, extrapolated
from megatron_chameleon.methods.swarm.folder import SwarmResult
from megatron_chameleon.methods.swarm.options import MixtureSamplingOptions
from megatron_chameleon.mixture.mixing_laws import MixingLaws, simplex_grid
from tests.small_corpus import DOMAINS
from tests.unit.methods.fit_runs import SWARM as FOUR_STEPS
from tests.unit.methods.fit_runs import make_options, sampled_runs

LAWS = LawOptions(num_starts=6)
SWARM = dataclasses.replace(FOUR_STEPS, train_iters=6)
TRUE = MixingLaws(
    constant=np.array([2.0, 1.5, 1.8]),
    scale=np.array([0.9, 1.4, 1.0]),
    exponents=np.array([[-3.0, 0.5, -0.5], [0.4, -4.0, -1.0], [0.3, 0.1, -5.0]]),
)


def runs(count=24):
    return sampled_runs(TRUE.predict, count)


@pytest.fixture
def options(corpus, tmp_path):
    """``options(runs, **changes)``: to fit ``runs``, or to train a swarm if None."""

    def make(existing=None, **changes):
        swarm = {} if existing else {"swarm": SWARM}
        settings = {"laws": LAWS, **swarm, **changes}
        return make_options(MixingLawsOptions, corpus, tmp_path, existing, settings)

    return make


@pytest.fixture
def compute(options, monkeypatch):
    """``compute(runs, **changes)``: the mixture, cross-validated with ``max_folds`` folds."""

    def run(*existing, max_folds=3, **changes):
        monkeypatch.setattr(f"{compute_mixing_laws.__module__}.MAX_FOLDS", max_folds)
        asked = options(*existing, **changes)
        assert compute_mixing_laws(asked)
        return Mixture.load(asked.output)

    return run


@pytest.mark.parametrize("target", [None, "news=3,poems=1"])
@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_the_optimum_of_the_true_laws_is_found(compute, target):
    mixture = compute(runs(), target=target)
    shares = np.array(list(mixture.parameters["target_shares"].values()))
    grid = np.concatenate(list(simplex_grid(3, 200)))
    best = grid[(TRUE.predict(grid) @ shares).argmin()]
    assert list(mixture.weights.values()) == pytest.approx(best, abs=0.02)
    predicted = mixture.parameters["predicted_losses"]
    expected = TRUE.predict(np.array([list(mixture.weights.values())]))[0]
    assert list(predicted.values()) == pytest.approx(expected, abs=0.01)


def test_the_laws_and_their_cross_validation_are_written(compute):
    mixture = compute(runs(count=10), max_folds=10)
    fit = mixture.parameters["fit"]
    assert fit["measured_by"] == "leave one out"
    assert all(error < 0.02 for error in fit["mae"].values())
    assert all(fit["mae"][name] < fit["linear_mae"][name] for name in DOMAINS)
    law = mixture.parameters["laws"]["code"]
    assert law["constant"] == pytest.approx(1.5, abs=0.1)
    assert min(law["exponents"], key=law["exponents"].__getitem__) == "code"
    fit = compute(runs(count=9), max_folds=8).parameters["fit"]
    assert fit["measured_by"] == "8-fold cross-validation"


def test_extrapolation_can_be_limited(compute):
    existing = runs()
    near = 0.2 + 0.4 * existing.mixtures
    middle = dataclasses.replace(existing, mixtures=near, losses=TRUE.predict(near))
    with pytest.warns(MixtureWarning, match="nearest run"):
        far = compute(middle, target="code")
    assert far.weights["code"] > near[:, 1].max() + 0.1
    limited = compute(middle, target="code", laws=dataclasses.replace(LAWS, max_extrapolation=0.0))
    assert limited.weights["code"] == pytest.approx(near[:, 1].max(), abs=1e-6)
    weights = np.array(list(limited.weights.values()))
    assert (near.min(axis=0) - 1e-9 <= weights).all()
    assert (weights <= near.max(axis=0) + 1e-9).all()


def test_poor_data_gives_a_warning_or_an_error(compute):
    with pytest.warns(MixtureWarning, match="4 runs"):
        compute(runs(count=4))
    existing = runs()
    with pytest.raises(UserError, match="above 0"):
        compute(dataclasses.replace(existing, losses=existing.losses - 3))


@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_swarms_of_every_size_are_trained_fitted_and_costed(compute, tmp_path, capsys):
    sizes = ("nano", "1m", "tiny")
    growing = dataclasses.replace(
        LAWS, target_steps=20, fit_steps_from=2, model_sizes=sizes, target_size="mini"
    )
    swarm = dataclasses.replace(FOUR_STEPS, eval_interval=1)
    sampling = MixtureSamplingOptions(smallest_weight=0.05)
    mixture = compute(num_proxies=4, sampling=sampling, laws=growing, swarm=swarm)
    folders = [tmp_path / "out" / "mixture" / f"swarm-{size}" for size in sizes]
    assert all((folder / "ratios.csv").is_file() for folder in folders)
    assert mixture.parameters["swarm"] == [str(folder) for folder in folders]
    assert set(mixture.parameters) >= {*(f"step_law_{size}" for size in sizes), "size_law"}
    capsys.readouterr()
    single = compute(
        num_proxies=4,
        sampling=sampling,
        swarm=dataclasses.replace(swarm, model_size="1m"),
        work_dir=tmp_path / "out" / "mixture",
    )
    assert "swarm: 0 of 4 members" in capsys.readouterr().out
    assert mixture.parameters["made_from"] == [f"mixture/swarm-{size}" for size in sizes]
    whole, part = (m.parameters["total_cost"]["flops"] for m in (mixture, single))
    assert whole > 1.5 * part > 0
    # The paper's rule: 6 N D, N being 12 L h^2 but for the 1M proxy, whose N it states.
    tokens = swarm.train_iters * swarm.global_batch_size * swarm.seq_length
    counted = [12 * 4 * 64**2, 1_000_000, 12 * 4 * 128**2]
    assert mixture.parameters["paper_flops"] == pytest.approx(6 * sum(counted) * tokens * 4)
    assert single.parameters["paper_flops"] == pytest.approx(6 * 1_000_000 * tokens * 4)
    assert mixture.cost.flops == 0


def power_law_swarm(name, diverged=()):
    """Losses of a known law over steps, mixtures and sizes: [n, steps, k]."""
    mixtures = np.random.default_rng(0).dirichlet(np.ones(3), 8)
    steps = np.array([2000, 4000, 6000, 8000, 10000])
    losses = known_losses(mixtures, steps, name)
    losses[list(diverged)] = np.nan
    return SwarmResult(
        list(DOMAINS), mixtures, steps.tolist(), losses, list(diverged), Cost(1.0, 1.0, 1.0)
    )


def known_losses(mixtures, steps, name):
    over_size = (2e5 / layer_parameters(name)) ** 0.3
    over_steps = (300 / np.asarray(steps, float)) ** 0.6
    return TRUE.predict(mixtures)[:, None] + over_size + over_steps[None, :, None]


def test_losses_are_extrapolated_to_the_target_s_steps_and_size(options):
    swarm = dataclasses.replace(SWARM, train_iters=10000, eval_interval=2000)
    growing = dataclasses.replace(
        LAWS, target_steps=30000, model_sizes=("nano", "tiny", "mini"), target_size="60m"
    )
    swarms = {
        name: power_law_swarm(name, diverged=[3] if name == "tiny" else [])
        for name in growing.model_sizes
    }
    losses, _, parameters = extrapolated(options(laws=growing, swarm=swarm), swarms)
    expected = known_losses(swarms["nano"].mixtures, [30000], "60m")[:, 0]
    assert np.isnan(losses[3]).all()
    kept = np.delete(np.arange(8), 3)
    np.testing.assert_allclose(losses[kept], expected[kept], atol=5e-3)
    assert parameters["step_law_nano"]["exponent"] == pytest.approx(0.6, abs=0.01)
    assert parameters["step_law_nano"]["backtest_mae"] < 1e-3
    assert parameters["size_law"]["exponent"] == pytest.approx(0.3, abs=0.01)
    growing = dataclasses.replace(LAWS, target_steps=30000, fit_steps_from=6000)
    _, _, parameters = extrapolated(
        options(laws=growing, swarm=swarm), {"nano": power_law_swarm("nano")}
    )
    assert parameters["step_law_nano"]["backtest_mae"] is None


@pytest.mark.parametrize(
    ("laws", "identifier"),
    [
        ({"num_starts": 0}, "--num-starts 0"),
        ({"fit_seed": -1}, "--fit-seed -1"),
        ({"huber_delta": 0.0}, "--huber-delta 0"),
        ({"law_ridge": -1.0}, "--law-ridge -1"),
        ({"max_extrapolation": 2.0}, "--max-extrapolation 2"),
        ({"target_steps": 6}, "--target-steps 6"),
        ({"target_steps": 20}, "--eval-interval"),
        ({"fit_steps_from": 3}, "--fit-steps-from"),
        ({"target_steps": 20, "fit_steps_from": -1}, "--fit-steps-from -1"),
        ({"model_sizes": ("nano", "tiny", "1m"), "target_size": "tiny"}, "--target-size tiny"),
        ({"target_size": "60m"}, "--model-sizes"),
        ({"model_sizes": ("nano", "tiny", "1m")}, "--target-size"),
        ({"model_sizes": ("nano", "tiny"), "target_size": "60m"}, "--model-sizes nano tiny"),
        ({"model_sizes": ("nano", "tiny", "huge"), "target_size": "60m"}, "huge"),
    ],
)
def test_law_options_out_of_range_are_rejected(options, laws, identifier):
    with pytest.raises(UserError, match=identifier):
        options(laws=dataclasses.replace(LAWS, **laws))


def test_laws_over_steps_and_sizes_need_a_swarm(options):
    with pytest.raises(UserError, match="--ratios"):
        options(runs(), laws=dataclasses.replace(LAWS, target_steps=100))
