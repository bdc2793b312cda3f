from __future__ import annotations

import dataclasses
import json

import torch

from megatron_chameleon.training.options import ProfilingOptions
from megatron_chameleon.training.profiling import StepProfiler

WANTED = ProfilingOptions(profile=True, profile_step_start=2, profile_step_end=4)


def run_steps(profiler, first, last):
    """Steps of one matrix product each; the files that were written, by step."""
    written = {}
    for done in range(first, last):
        profiler.before_step(done)
        torch.ones(8, 8) @ torch.ones(8, 8)
        path = profiler.after_step(done + 1)
        if path:
            written[done + 1] = path
    return written


def test_the_trace_holds_the_steps_asked_for(tmp_path, one_rank):
    written = run_steps(StepProfiler(WANTED, tmp_path, one_rank), 0, 6)
    assert written == {4: tmp_path / "profile" / "steps-3-to-4.json"}
    events = json.loads(written[4].read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 2
    assert [path.name for path in written[4].parent.iterdir()] == ["steps-3-to-4.json"]


def test_a_run_that_goes_on_later_or_without_the_option_writes_none(tmp_path, one_rank):
    assert run_steps(StepProfiler(WANTED, tmp_path, one_rank), 3, 6) == {}
    assert run_steps(StepProfiler(ProfilingOptions(), tmp_path, one_rank), 0, 14) == {}
    other = dataclasses.replace(one_rank, rank=1)
    assert run_steps(StepProfiler(WANTED, tmp_path, other), 0, 6) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_stops_within_the_trace_writes_what_it_has(tmp_path, one_rank):
    profiler = StepProfiler(WANTED, tmp_path, one_rank)
    run_steps(profiler, 0, 3)
    assert profiler.finish(3) == tmp_path / "profile" / "steps-3-to-3.json"
    assert profiler.finish(3) is None
