"""When and where a comparison was made, for its record."""

from __future__ import annotations

import datetime
import os
import platform
from typing import Any

from megatron_chameleon.report.head_to_head.compare import HeadToHead
from megatron_chameleon.report.head_to_head.runs import last_checkpoint


def made_on(compared: HeadToHead) -> dict[str, Any]:
    """The date, this machine, the versions that trained the base models and their commits."""
    runs = [run for c in compared for run in c.runs]
    layout = last_checkpoint(runs[0]).layout
    commits = dict.fromkeys(run.provenance.git_commit for run in runs)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "device": layout["device"],
            "devices_of_a_base_run": layout["world_size"],
            "processor": processor_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
            "system": platform.platform(),
        },
        "versions": runs[0].provenance.versions,
        "git_commits": [commit for commit in commits if commit],
    }


def processor_name() -> str:
    """The processor's model, as Linux tells it, or the architecture where it does not."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            models = [line.partition(":")[2].strip() for line in stream if "model name" in line]
    except FileNotFoundError:  # another system
        models = []
    return models[0] if models else platform.machine()
