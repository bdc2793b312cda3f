"""Test that compiled layers keep the losses and need one graph per layer in all kinds of layouts.

The backend runs the graphs eagerly, or inductor compiles them for the CPU; their speed on a GPU is
not measured. tests/unit/model/test_gpt.py tests compiled layers on one rank.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.cases import COMPILED
from tests.distributed.launch import finish, start, torchrun

SECONDS = 1800.0
# With recomputation, layers first run without gradients, which compiles a second graph.
GRAPHS = {
    name: 2 if parallel.recompute.recompute_granularity == "full" else 1
    for name, parallel in COMPILED.items()
}
NUM_RANKS = 2
# Relative tolerances of losses. The backend aot_eager runs the operations of eager mode; inductor
# fuses operations, which changes their rounding.
AOT_TOLERANCE, INDUCTOR_TOLERANCE = 1e-6, 1e-4
# A gradient norm has the rounding errors of the backward pass, too, whose operations aot_eager
# decomposes. They depend on the processor: 2e-6 on one, less than 1e-6 on others.
NORM_FACTOR = 10


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
            assert compiled[:-1] == pytest.approx(plain[:-1], rel=tolerance, abs=0)
            assert compiled[-1] == pytest.approx(plain[-1], rel=NORM_FACTOR * tolerance, abs=0)
    # Only ranks of the last pipeline stage have losses, so at least one rank must have some.
    assert any(loss > 0 for of_rank in found for loss in of_rank[name]["plain"][0][:-1])


@pytest.mark.parametrize(
    ("backend", "names", "tolerance"),
    [
        ("aot_eager", ("sp2-selective-qwen3", "vpp2-llama"), AOT_TOLERANCE),
        pytest.param(
            "inductor",
            ("sp2-selective-qwen3", "pp2-full-qwen2"),
            INDUCTOR_TOLERANCE,
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++"),
            ],
        ),
    ],
)
def test_losses_are_equal_and_a_layer_is_one_graph(tmp_path, backend, names, tolerance):
    found = run_ranks(tmp_path, backend, names)
    for name in names:
        check(found, name, tolerance)
