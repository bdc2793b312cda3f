"""What examples/evaluate_downstream.sh starts: the paper's tasks, for each run that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_chameleon.evaluation.options import PAPER_TASKS, DownstreamOptions
from tests.unit.launched import Launcher

NAME = "evaluate_downstream"
BASE = Path("runs/slimpajama/5-base")


@pytest.fixture
def launch(tmp_path):
    for name in ("uniform-seed1", "chameleon-pretrain-seed1"):
        (tmp_path / BASE / name).mkdir(parents=True)
    return Launcher(tmp_path)


def options_of(launched) -> list[DownstreamOptions]:
    assert launched.status == 0, launched.errors
    assert {call.program for call in launched.calls} == {"torchrun"}
    return [call.options for call in launched.calls]


def test_every_base_run_is_asked_what_the_paper_asks(launch):
    chameleon, uniform = options_of(launch(NAME))
    assert chameleon.checkpoint == BASE / "chameleon-pretrain-seed1"
    evaluation = Path("runs/slimpajama/6-evaluation")
    assert chameleon.output == evaluation / "chameleon-pretrain-seed1-downstream.json"
    assert uniform.checkpoint == BASE / "uniform-seed1"
    assert uniform.tasks == PAPER_TASKS
    assert uniform.shots == (0, 1, 2, 3, 4, 5)
    assert (uniform.limit, uniform.data_dir) == (None, None)


def test_what_is_tried_out_is_tiny_and_on_two_ranks(launch):
    launched = launch(NAME, SIZE="tiny", DATA_DIR="my copies")
    (options,) = options_of(launched)
    assert launched.calls[0].ranks.nproc_per_node == "2"
    assert options.checkpoint == Path("runs/tiny/pretrain_684m_pile/5-base/uniform-seed1")
    assert (options.shots, options.limit, options.tasks) == ((0, 1), 4, PAPER_TASKS)
    assert options.data_dir == Path("my copies")


def test_the_environment_and_flags_choose(launch):
    choices = {"CHECKPOINTS": "here there", "RUN": "run", "TP": "2"}
    here, there = options_of(launch(NAME, "--", "--tasks", "sciq", **choices))
    assert (here.checkpoint, there.checkpoint) == (Path("here"), Path("there"))
    assert here.output == Path("run/6-evaluation/here-downstream.json")
    assert here.tasks == ("sciq",)
    assert here.parallel.tensor_model_parallel_size == 2


def test_without_a_run_it_says_what_makes_one(launch):
    launched = launch(NAME, RUN="nowhere")
    assert launched.status == 2
    assert launched.calls == []
    assert "there is no run in nowhere/5-base" in launched.errors
