"""A trace of some steps by torch's profiler, on the first rank."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.options import ProfilingOptions

FOLDER_NAME = "profile"


class StepProfiler:
    """Records the steps that the options name, and writes the trace when they are done."""

    def __init__(self, options: ProfilingOptions, run_dir: Path, layout: Layout) -> None:
        self._options, self._folder = options, run_dir / FOLDER_NAME
        self._wanted = options.profile and layout.is_main
        self._on_gpu = layout.device.type == "cuda"
        self._running: torch.profiler.profile | None = None

    def before_step(self, steps_done: int) -> None:
        """Begin the trace if it is time."""
        if not self._wanted or steps_done != self._options.profile_step_start:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._running = torch.profiler.profile(activities=activities)
        self._running.start()

    def after_step(self, steps_done: int) -> Path | None:
        """End the trace if it is time; the file that it was written to."""
        if self._running is None or steps_done < self._options.profile_step_end:
            return None
        return self.finish(steps_done)

    def finish(self, steps_done: int) -> Path | None:
        """End the trace whatever the step, if one is being made; the file, if it can be written."""
        trace, self._running = self._running, None
        if trace is None:
            return None
        trace.stop()
        first = self._options.profile_step_start + 1
        path = self._folder / f"steps-{first}-to-{steps_done}.json"
        try:
            with replacing(path) as temporary:
                trace.export_chrome_trace(os.fspath(temporary))
        except (OSError, UserError) as error:
            warnings.warn(f"no trace of --profile: {error}", stacklevel=2)
            return None
        return path
