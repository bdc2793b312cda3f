"""Compiled layers in every kind of layout: the losses are the same, and no layer is cut in pieces.

The graphs run eagerly, or on the CPU by inductor; what they gain on a GPU is not looked at.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.compiled_cases import CASES, NUM_RANKS
from tests.distributed.launch import finish, start, torchrun

SECONDS = 1800.0
# Recomputation runs a layer without gradients first, which is another graph.
GRAPHS = {
    name: 2 if case.parallel.recompute.recompute_granularity == "full" else 1
    for name, case in CASES.items()
}
INDUCTOR_CASES = ("sp2-selective", "pp2-full")
# Of losses and norms: aot_eager runs the same operations, inductor fuses them.
AOT_TOLERANCE, INDUCTOR_TOLERANCE = 1e-6, 1e-4


def run_ranks(root, backend, names):
    script, log = Path(__file__).with_name("compiled_ranks.py"), root / "log"
    command = torchrun(NUM_RANKS, script, str(root), backend, *names)
    assert finish(start(command, log), SECONDS) == 0, log.read_text()[-4000:]
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def check(found, name, tolerance):
    for of_rank in found:
        case = of_rank[name]
        assert case["breaks"] == []
        assert case["graphs"] == GRAPHS[name]
        for compiled, plain in zip(case["compiled"], case["plain"], strict=True):
            assert compiled == pytest.approx(plain, rel=tolerance, abs=0)
    # The last stage has losses, and the norms move.
    assert any(loss > 0 for of_rank in found for loss in of_rank[name]["plain"][0][:-1])


@pytest.fixture(scope="module")
def eager_graphs(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("aot_eager"), "aot_eager", CASES)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_same_and_a_layer_is_one_graph(eager_graphs, name):
    check(eager_graphs, name, AOT_TOLERANCE)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_changes_losses_by_rounding_alone(tmp_path):
    found = run_ranks(tmp_path, "inductor", INDUCTOR_CASES)
    for name in INDUCTOR_CASES:
        check(found, name, INDUCTOR_TOLERANCE)
