"""DoReMi finds the weights of one rank in every layout, and its proxy trains as it does there."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from megatron_chameleon.artifacts import Mixture, TrainingRun
from tests.distributed.conftest import Results
from tests.distributed.doremi_cases import DOREMI, DOREMI_AGAIN, plain_case
from tests.distributed.layout_cases import TRAIN_ITERS

TOLERANCE = 5e-6
OTHERS = [name for name in (*DOREMI, *DOREMI_AGAIN) if name != plain_case(name)]


def mixture(results: Results, name: str) -> Mixture:
    results.require(name)
    return Mixture.load(results.places.run(name) / "doremi.json")


def proxy(results: Results, name: str) -> TrainingRun:
    results.require(name)
    return TrainingRun.load(results.places.run(name) / "proxy")


def figures(run: TrainingRun) -> dict[str, np.ndarray]:
    lines = list(run.metrics())

    def of_hook(part: str) -> list[list[float]]:
        return [list(line["hook"][part].values()) for line in lines]

    found: dict[str, Any] = {name: [line[name] for line in lines] for name in ("loss", "grad_norm")}
    found |= {part: of_hook(part) for part in ("weights", "mean_weights", "excess")}
    return {name: np.array(values) for name, values in found.items()}


@pytest.mark.parametrize("name", OTHERS)
def test_a_layout_finds_the_weights_of_one_rank_and_trains_alike(
    results: Results, name: str
) -> None:
    expected = figures(proxy(results, plain_case(name)))
    found = figures(proxy(results, name))
    for part, values in expected.items():
        assert len(values) == TRAIN_ITERS
        np.testing.assert_allclose(found[part], values, TOLERANCE, TOLERANCE, err_msg=part)
    weights, wanted = mixture(results, name).weights, mixture(results, plain_case(name)).weights
    assert weights == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["doremi-one", "doremi-one-masked", "doremi-one-fork"])
def test_the_weights_move_and_change_what_is_trained(results: Results, name: str) -> None:
    found = figures(proxy(results, name))
    assert np.ptp(found["weights"][-1]) > 0.01
    assert len(np.unique(found["weights"][:, 0])) == TRAIN_ITERS
    plain = np.array([line["loss"] for line in results.metrics("one")])
    assert np.abs(found["loss"] - plain).max() > 1e-3


def test_the_forks_rule_is_another(results: Results) -> None:
    """It differs in what is clipped: the step size is the same."""
    variants = [figures(proxy(results, f"doremi-one-{kind}")) for kind in ("masked", "fork")]
    assert np.abs(variants[0]["excess"] - variants[1]["excess"]).max() > 1e-3


@pytest.mark.parametrize("name", OTHERS)
def test_every_layout_counts_the_same_cost(results: Results, name: str) -> None:
    if name in DOREMI:
        costs = [proxy(results, each).cost.flops for each in (name, plain_case(name))]
        assert costs[0] == costs[1]
    found = mixture(results, name)
    runs = [(results.places.run(name) / path) for path in found.parameters["made_from"]]
    flops = [json.loads((run / "run.json").read_text())["cost"]["flops"] for run in runs]
    assert found.parameters["total_cost"]["flops"] == sum(flops)
