from __future__ import annotations

import dataclasses
import json

import torch

from megatron_chameleon.training.metrics import StepProfiler
from megatron_chameleon.training.options import ProfilingOptions

WANTED = ProfilingOptions(profile=True, profile_step_start=2, profile_step_end=4)


def run_steps(profiler, first, last):
    """Run steps of one matrix product each."""
    for done in range(first, last):
        profiler.before_step(done)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.after_step(done + 1)


def test_trace_holds_the_chosen_steps(tmp_path, one_rank):
    run_steps(StepProfiler(WANTED, tmp_path, one_rank), 0, 6)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "steps-3-to-4.json"
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 2


def test_trace_of_a_run_that_stops_early(tmp_path, one_rank):
    profiler = StepProfiler(WANTED, tmp_path, one_rank)
    run_steps(profiler, 0, 3)
    profiler.finish(3)
    profiler.finish(3)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["steps-3-to-3.json"]


def test_no_trace_after_its_start_without_the_option_or_on_other_ranks(tmp_path, one_rank):
    run_steps(StepProfiler(WANTED, tmp_path, one_rank), 3, 6)
    run_steps(StepProfiler(ProfilingOptions(), tmp_path, one_rank), 0, 14)
    other = dataclasses.replace(one_rank, rank=1)
    run_steps(StepProfiler(WANTED, tmp_path, other), 0, 6)
    assert list(tmp_path.iterdir()) == []
