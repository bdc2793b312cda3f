"""A hook sees the same, decides the same and trains the same in every layout."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_chameleon.artifacts import TrainingRun
from tests.distributed.conftest import Results
from tests.distributed.hooked_cases import HOOKED, HOOKED_AGAIN
from tests.distributed.layout_cases import TRAIN_ITERS

TOLERANCE = 5e-6


def figures(results: Results, run: str) -> dict[str, np.ndarray]:
    lines = results.metrics(run)
    return {
        "loss": np.array([line["loss"] for line in lines]),
        "grad_norm": np.array([line["grad_norm"] for line in lines]),
        "weights": np.array([line["hook"]["weights"] for line in lines]),
    }


def assert_alike(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, TOLERANCE, TOLERANCE, err_msg=name)


@pytest.mark.parametrize("run", [name for name in HOOKED if not name.endswith("-one")])
def test_a_hook_decides_and_trains_alike_in_every_layout(results: Results, run: str) -> None:
    hook, _ = HOOKED[run]
    assert_alike(figures(results, run), figures(results, f"{hook}-one"))


@pytest.mark.parametrize("run", HOOKED_AGAIN)
def test_a_hook_goes_on_from_where_it_was(results: Results, run: str) -> None:
    origin, _ = HOOKED_AGAIN[run]
    assert_alike(figures(results, run), figures(results, origin))


@pytest.mark.parametrize("hook", ["weigher", "combiner", "changer"])
def test_what_a_hook_decides_changes_the_run(results: Results, hook: str) -> None:
    weights = figures(results, f"{hook}-one")["weights"]
    assert np.ptp(weights[-1]) > 0.01
    assert len(np.unique(weights[:, 0])) == TRAIN_ITERS
    if hook == "changer":
        return
    plain = np.array([line["loss"] for line in results.metrics("one")])
    assert np.abs(figures(results, f"{hook}-one")["loss"] - plain).max() > 1e-3


def test_the_mixture_follows_the_hook(results: Results) -> None:
    run = TrainingRun.load(results.places.run("changer-one"))
    firsts = [phase.first_sample for phase in run.mixture_phases]
    assert firsts == [0, 4 * 8, 8 * 8]
    weights = figures(results, "changer-one")["weights"]
    changed = np.array([list(phase.weights.values()) for phase in run.mixture_phases[1:]])
    np.testing.assert_allclose(changed, weights[[3, 7]], atol=1e-6)
    assert np.ptp(changed[1]) > 0.01


@pytest.mark.parametrize("run", HOOKED)
def test_every_rank_counts_the_same_cost(results: Results, run: str) -> None:
    told = results.metrics(run)[-1]["hook"]["flops"]
    files = list(results.places.hook_flops(run).iterdir())
    assert len(files) == HOOKED[run][1].ranks
    assert {json.loads(file.read_text()) for file in files} == {told}


def test_only_pipelines_have_to_fill_up(results: Results) -> None:
    for run, (hook, case) in HOOKED.items():
        if hook == "combiner" and case.parallel.pipeline_model_parallel_size == 1:
            assert results.metrics(run)[-1]["hook"]["flops"] == 0, run
    # Two micro-batches of one size for three samples of a domain.
    assert results.metrics("combiner-vpp2")[-1]["hook"]["flops"] > 0


def test_looking_at_the_losses_costs_a_forward_pass(results: Results) -> None:
    """Of the whole global batch at every step: a third of what training costs."""
    plain = TrainingRun.load(results.places.run("one")).cost.flops
    hooked = TrainingRun.load(results.places.run("weigher-one")).cost.flops
    told = results.metrics("weigher-one")[-1]["hook"]["flops"]
    assert hooked == pytest.approx(plain + told)
    assert told == pytest.approx(plain / 3)
