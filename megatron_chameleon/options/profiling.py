"""Which steps are looked at closely."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ProfilingOptions:
    """Which steps torch's profiler records on the first rank."""

    profile: bool = False
    """Write a trace of some steps to the folder 'profile' of the run; chrome://tracing and Perfetto
    show it."""
    profile_step_start: int = 10
    """Steps done when the trace begins."""
    profile_step_end: int = 12
    """Steps done when it ends."""
