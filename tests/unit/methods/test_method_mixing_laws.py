"""--method mixing-laws: from swarms or from a person's tables to mixture.json."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_chameleon.artifacts import Cost, Mixture, MixtureWarning
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.fits import mixing_laws as laws_module
from megatron_chameleon.methods.fits.mixing_laws import MOST_FOLDS, compute_mixing_laws
from megatron_chameleon.methods.fits.sizes_and_steps import grown
from megatron_chameleon.methods.mixing_laws import METHOD, LawOptions, MixingLawsOptions
from megatron_chameleon.methods.swarm.result import SwarmResult
from megatron_chameleon.mixture.law_optimum import simplex_grid
from megatron_chameleon.mixture.mixing_laws import MixingLaws
from megatron_chameleon.model.sizes import SIZES, ModelShape
from megatron_chameleon.options.fits import DrawOptions
from megatron_chameleon.options.stopping import StoppingOptions
from tests.small_corpus import DOMAINS, VOCAB_SIZE
from tests.unit.methods.fit_runs import SWARM as FOUR_STEPS
from tests.unit.methods.fit_runs import drawn_runs, make_options

LAWS = LawOptions(num_starts=6)
SWARM = dataclasses.replace(FOUR_STEPS, train_iters=6)
DRAWS = DrawOptions(smallest_weight=0.05)
TRUE = MixingLaws(
    constant=np.array([2.0, 1.5, 1.8]),
    scale=np.array([0.9, 1.4, 1.0]),
    exponents=np.array([[-3.0, 0.5, -0.5], [0.4, -4.0, -1.0], [0.3, 0.1, -5.0]]),
)


def runs(count=24):
    return drawn_runs(TRUE.predict, count)


@pytest.fixture
def options(corpus, tmp_path):
    """``options(runs, **changes)``: to fit ``runs``, or to train without any."""

    def make(given=None, **changes):
        swarm = {} if given else {"swarm": SWARM}
        settings = {"laws": LAWS, **swarm, **changes}
        return make_options(MixingLawsOptions, corpus, tmp_path, given, settings)

    return make


@pytest.fixture
def compute(options, monkeypatch):
    """``compute(runs, **changes)``; the fit is judged in ``most_folds`` parts, for the time."""

    def run(*given, most_folds=3, **changes):
        monkeypatch.setattr(laws_module, "MOST_FOLDS", most_folds)
        asked = options(*given, **changes)
        compute_mixing_laws(asked)
        return Mixture.load(asked.output)

    return run


@pytest.mark.parametrize("target", [None, "code", "news=3,poems=1"])
@pytest.mark.filterwarnings("ignore:the mixture is far from what was trained")
def test_the_optimum_of_the_true_laws_is_found(compute, target):
    mixture = compute(runs(), target=target)
    shares = np.array(list(mixture.parameters["target_shares"].values()))
    grid = np.concatenate(list(simplex_grid(3, 200)))
    best = grid[(TRUE.predict(grid) @ shares).argmin()]
    assert list(mixture.weights.values()) == pytest.approx(best, abs=0.02)
    predicted = mixture.parameters["predicted_losses"]
    expected = TRUE.predict(np.array([list(mixture.weights.values())]))[0]
    assert list(predicted.values()) == pytest.approx(expected, abs=0.01)


def test_the_laws_and_their_error_on_runs_left_out_are_told(compute, capsys):
    mixture = compute(runs(count=14), most_folds=14)
    fit = mixture.parameters["fit"]
    assert fit["measured_by"] == "leave one out"
    assert all(error < 0.02 for error in fit["mae"].values())
    assert all(fit["mae"][name] < fit["linear_mae"][name] for name in DOMAINS)
    law = mixture.parameters["laws"]["code"]
    assert law["constant"] == pytest.approx(1.5, abs=0.1)
    assert min(law["exponents"], key=law["exponents"].__getitem__) == "code"
    assert "leave one out; * is in the target" in capsys.readouterr().out


def test_more_runs_than_are_left_out_singly_go_in_groups(compute):
    assert MOST_FOLDS == 128
    fit = compute(runs(count=9), most_folds=8).parameters["fit"]
    assert fit["measured_by"] == "8-fold cross-validation"
    assert compute(runs(count=8), most_folds=8).parameters["fit"]["measured_by"] == "leave one out"


def test_no_weight_leaves_what_was_trained_by_more_than_is_allowed(compute):
    given = runs()
    near = 0.2 + 0.4 * given.mixtures
    middle = dataclasses.replace(given, mixtures=near, losses=TRUE.predict(near))
    with pytest.warns(MixtureWarning, match="far from what was trained"):
        far = compute(middle, target="code")
    assert far.weights["code"] > near[:, 1].max() + 0.1
    held = compute(middle, target="code", laws=dataclasses.replace(LAWS, max_extrapolation=0.0))
    assert held.weights["code"] == pytest.approx(near[:, 1].max(), abs=1e-6)
    assert all(
        low - 1e-9 <= weight <= high + 1e-9
        for low, weight, high in zip(
            near.min(axis=0), held.weights.values(), near.max(axis=0), strict=True
        )
    )


def test_fewer_runs_than_unknowns_are_called_out(compute):
    with pytest.warns(MixtureWarning, match="4 runs for laws of 5 unknowns each"):
        compute(runs(count=4))


def test_a_metric_that_no_law_has_is_refused(compute):
    given = runs()
    with pytest.raises(UserError, match=r"no law can be fitted: losses must be finite and above 0"):
        compute(dataclasses.replace(given, losses=given.losses - 3))


@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_swarms_of_every_size_are_trained_fitted_and_paid_for(compute, tmp_path, capsys):
    sizes = ("nano", "1m", "tiny")
    growing = dataclasses.replace(
        LAWS, target_steps=20, fit_steps_from=2, model_sizes=sizes, target_size="mini"
    )
    swarm = dataclasses.replace(FOUR_STEPS, eval_interval=1)
    mixture = compute(num_proxies=4, draws=DRAWS, laws=growing, swarm=swarm)
    folders = [tmp_path / "out" / "mixture" / f"swarm-{size}" for size in sizes]
    assert all((folder / "ratios.csv").is_file() for folder in folders)
    assert mixture.parameters["swarm"] == [str(folder) for folder in folders]
    assert set(mixture.parameters) >= {*(f"step_law_{size}" for size in sizes), "size_law"}
    said = capsys.readouterr().out
    assert "losses of mini by a power law over nano, 1m, tiny" in said
    alone = compute(
        num_proxies=4,
        draws=DRAWS,
        swarm=dataclasses.replace(swarm, model_size="1m"),
        work_dir=tmp_path / "out" / "mixture",
    )
    assert "all 4 members are there" in capsys.readouterr().out
    assert mixture.parameters["made_from"] == [f"mixture/swarm-{size}" for size in sizes]
    whole, part = (m.parameters["total_cost"]["flops"] for m in (mixture, alone))
    assert whole > 1.5 * part > 0
    # The paper's rule: 6 N D, N being 12 L h^2 but for the 1M proxy, of which the paper says it.
    tokens = swarm.train_iters * swarm.global_batch_size * swarm.seq_length
    counted = [12 * 4 * 64**2, 1_000_000, 12 * 4 * 128**2]
    assert mixture.parameters["paper_flops"] == pytest.approx(6 * sum(counted) * tokens * 4)
    assert alone.parameters["paper_flops"] == pytest.approx(6 * 1_000_000 * tokens * 4)
    assert mixture.cost.flops == 0


def power_law_swarm(options, corpus, name, diverged=()):
    """Losses of a known law over steps, mixtures and sizes: [n, steps, k]."""
    mixtures = np.random.default_rng(0).dirichlet(np.ones(3), 8)
    steps = np.array([2000, 4000, 6000, 8000, 10000])
    losses = known_losses(mixtures, steps, name)
    losses[list(diverged)] = np.nan
    return SwarmResult(
        list(DOMAINS), mixtures, steps.tolist(), losses, list(diverged), Cost(1.0, 1.0, 1.0)
    )


def parameters_of(name):
    shape = ModelShape(SIZES[name], VOCAB_SIZE, 32)
    return shape.size.num_layers * shape.layer_parameters


def known_losses(mixtures, steps, name):
    over_size = (2e5 / parameters_of(name)) ** 0.3
    over_steps = (300 / np.asarray(steps, float)) ** 0.6
    return TRUE.predict(mixtures)[:, None] + over_size + over_steps[None, :, None]


def test_losses_are_carried_to_the_target_s_steps_and_size(options, corpus):
    swarm = dataclasses.replace(SWARM, train_iters=10000, eval_interval=2000)
    growing = dataclasses.replace(
        LAWS, target_steps=30000, model_sizes=("nano", "tiny", "mini"), target_size="60m"
    )
    asked = options(laws=growing, swarm=swarm)
    swarms = {
        name: power_law_swarm(asked, corpus, name, diverged=[3] if name == "tiny" else [])
        for name in growing.model_sizes
    }
    found = grown(asked, swarms)
    expected = known_losses(swarms["nano"].mixtures, [30000], "60m")[:, 0]
    assert np.isnan(found.losses[3]).all()
    kept = np.delete(np.arange(8), 3)
    np.testing.assert_allclose(found.losses[kept], expected[kept], atol=5e-3)
    assert found.parameters["step_law_nano"]["exponent"] == pytest.approx(0.6, abs=0.01)
    assert found.parameters["step_law_nano"]["backtest_mae"] < 1e-3
    assert found.parameters["size_law"]["exponent"] == pytest.approx(0.3, abs=0.01)


def test_three_measurements_leave_none_to_try_the_law_on(options, corpus):
    swarm = dataclasses.replace(SWARM, train_iters=10000, eval_interval=2000)
    growing = dataclasses.replace(LAWS, target_steps=30000, fit_steps_from=6000)
    asked = options(laws=growing, swarm=swarm)
    found = grown(asked, {"nano": power_law_swarm(asked, corpus, "nano")})
    assert found.parameters["step_law_nano"]["backtest_mae"] is None
    (told,) = found.told
    assert told.endswith("over the measurements")


@pytest.mark.parametrize(
    ("laws", "told"),
    [
        ({"num_starts": 0}, "--num-starts 0"),
        ({"fit_seed": -1}, "--fit-seed -1"),
        ({"huber_delta": 0.0}, "--huber-delta 0"),
        ({"law_ridge": -1.0}, "--law-ridge -1"),
        ({"max_extrapolation": 2.0}, "--max-extrapolation 2"),
        ({"target_steps": 6}, "--target-steps 6 is not beyond --train-iters 6"),
        ({"target_steps": 20}, "3 measurements from step 2 on, and there are 1"),
        ({"fit_steps_from": 3}, "--fit-steps-from chooses what --target-steps is predicted from"),
        ({"target_steps": 20, "fit_steps_from": -1}, "--fit-steps-from -1: "),
        (
            {"model_sizes": ("nano", "tiny", "1m"), "target_size": "tiny"},
            "--target-size tiny is not larger than 1m, the largest of --model-sizes",
        ),
        (
            {"model_sizes": ("tiny", "mini", "60m"), "target_size": "nano"},
            "--target-size nano is not larger than 60m, the largest of --model-sizes",
        ),
        ({"target_size": "60m"}, "--model-sizes and --target-size belong together"),
        ({"model_sizes": ("nano", "tiny", "1m")}, "--model-sizes and --target-size belong"),
        ({"model_sizes": ("nano", "tiny"), "target_size": "60m"}, "takes 3 different ones"),
        (
            {"model_sizes": ("nano", "tiny", "huge"), "target_size": "60m"},
            "--model-size huge: there is no such size",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(options, laws, told, tmp_path):
    with pytest.raises(UserError, match=told):
        compute_mixing_laws(options(laws=dataclasses.replace(LAWS, **laws)))
    assert not (tmp_path / "out").exists()


def test_too_few_proxies_are_refused(options):
    with pytest.raises(UserError, match="3 runs are too few for a law: give 4 or more"):
        compute_mixing_laws(options(num_proxies=3))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_persons_runs_are_fitted_by_the_first_rank_alone(options, monkeypatch, rank):
    asked = options(runs(count=6))
    monkeypatch.setenv("RANK", rank)
    assert compute_mixing_laws(asked)  # all of them have the same status
    assert asked.output.exists() == (rank == "0")


def test_a_swarm_that_was_asked_to_stop_leaves_no_mixture_and_says_so(options, capsys):
    at_once = dataclasses.replace(SWARM, stopping=StoppingOptions(exit_duration_in_mins=1e-9))
    asked = options(swarm=at_once)
    assert METHOD.compute(asked) == STOPPED_STATUS
    assert not asked.output.exists()
    assert "has stopped; the same command goes on with it" in capsys.readouterr().out


def test_a_persons_runs_are_not_carried_further(options):
    with pytest.raises(UserError, match="are for proxies that are trained here"):
        compute_mixing_laws(options(runs(), laws=dataclasses.replace(LAWS, target_steps=100)))
