"""DoGE finds the same weights, and trains the same proxy, in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_chameleon.artifacts import Mixture, TrainingRun
from tests.distributed.conftest import Results
from tests.distributed.doge_cases import DOGE, DOGE_AGAIN, proxy_of
from tests.distributed.layout_cases import TRAIN_ITERS
from tests.small_corpus import DOMAINS

TOLERANCE = 1e-5
OTHERS = [name for name in (*DOGE, *DOGE_AGAIN) if name not in ("doge-one", "doge-towards-one")]


def like(name: str) -> str:
    """The mixture that one rank finds of the same target."""
    return "doge-towards-one" if "towards" in name else "doge-one"


def mixture_of(results: Results, name: str) -> Mixture:
    results.require(name)
    return Mixture.load(results.places.run(name) / "mixture.json")


def lines_of(results: Results, name: str) -> list[dict[str, Any]]:
    results.require(name)
    return list(TrainingRun.load(proxy_of(results.places, name)).metrics())


@pytest.mark.parametrize("name", OTHERS)
def test_a_layout_finds_the_weights_of_one_rank_and_trains_alike(
    results: Results, name: str
) -> None:
    found, expected = mixture_of(results, name), mixture_of(results, like(name))
    assert found.weights == pytest.approx(expected.weights, abs=TOLERANCE)
    assert found.scores == pytest.approx(expected.scores, abs=10 * TOLERANCE)
    steps, wanted = lines_of(results, name), lines_of(results, like(name))
    assert len(steps) == len(wanted) == TRAIN_ITERS
    for field in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            [line[field] for line in steps],
            [line[field] for line in wanted],
            TOLERANCE,
            TOLERANCE,
            err_msg=field,
        )
    weights = [[list(line["hook"]["weights"].values()) for line in one] for one in (steps, wanted)]
    np.testing.assert_allclose(weights[0], weights[1], atol=TOLERANCE)


@pytest.mark.parametrize("name", ["doge-one", "doge-towards-one"])
def test_the_weights_move(results: Results, name: str) -> None:
    mixture = mixture_of(results, name)
    weighed = [mixture.weights[domain] for domain in DOMAINS if mixture.weights[domain]]
    assert len(weighed) == (2 if "towards" in name else 3)
    assert max(weighed) - min(weighed) > 0.01


@pytest.mark.parametrize("name", [name for name in OTHERS if name in DOGE])
def test_only_pipelines_cost_more_for_what_they_have_to_fill_up(
    results: Results, name: str
) -> None:
    """Less than a sample for each micro-batch, of two or four samples."""
    names = (name, like(name))
    found, plain = (TrainingRun.load(proxy_of(results.places, n)).cost.flops for n in names)
    if DOGE[name][0].parallel.pipeline_model_parallel_size == 1:
        assert found == plain
    else:
        assert plain <= found < 1.4 * plain
    if name in ("doge-pp2", "doge-towards-vpp2"):  # three samples in two micro-batches
        assert found > plain
