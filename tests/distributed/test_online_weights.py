"""Weights that follow the model are the same in every layout."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.artifacts import TrainingRun
from tests.distributed.conftest import Results
from tests.distributed.layout_cases import TRAIN_ITERS
from tests.distributed.online_cases import INTERVAL, ONLINE, ONLINE_AGAIN

TOLERANCE = 5e-6
OTHERS = [name for name in (*ONLINE, *ONLINE_AGAIN) if name != "online-one"]


def phases_of(results: Results, run: str) -> tuple[list[int], np.ndarray]:
    """Where each mixture begins, in samples, and its weights."""
    results.require(run)
    phases = TrainingRun.load(results.places.run(run)).mixture_phases
    return [p.first_sample for p in phases], np.array([list(p.weights.values()) for p in phases])


@pytest.mark.parametrize("run", OTHERS)
def test_a_layout_finds_the_weights_of_one_rank_and_trains_alike(
    results: Results, run: str
) -> None:
    starts, weights = phases_of(results, run)
    expected_starts, expected = phases_of(results, "online-one")
    assert starts == expected_starts
    np.testing.assert_allclose(weights, expected, atol=TOLERANCE)
    for field in ("loss", "grad_norm"):
        found, wanted = (
            [line[field] for line in results.metrics(name)] for name in (run, "online-one")
        )
        np.testing.assert_allclose(found, wanted, TOLERANCE, TOLERANCE, err_msg=field)
    drawn = [
        [line["domain_tokens_drawn"] for line in results.metrics(n)] for n in (run, "online-one")
    ]
    assert drawn[0] == drawn[1]


def test_the_weights_move_at_every_interval(results: Results) -> None:
    starts, weights = phases_of(results, "online-one")
    assert starts == [step * 8 for step in range(0, TRAIN_ITERS, INTERVAL)]
    assert np.abs(np.diff(weights, axis=0)).max(axis=1).min() > 0.005


@pytest.mark.parametrize("run", [name for name in OTHERS if name in ONLINE])
def test_every_layout_counts_the_same_cost(results: Results, run: str) -> None:
    costs = [TrainingRun.load(results.places.run(name)).cost.flops for name in (run, "online-one")]
    assert costs[0] == costs[1]
