#!/usr/bin/env python3
"""Print what acceleration is active on this machine, and what has run on a CUDA device."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megatron_chameleon.cli import run_tool
from megatron_chameleon.options.doctor import DoctorOptions


def main(options: DoctorOptions) -> None:
    """Look and print; the exit status is 0 whatever is found."""
    from megatron_chameleon.parallel.acceleration import acceleration_report, format_report

    report = acceleration_report(Path(__file__).resolve().parents[1])
    print(json.dumps(dataclasses.asdict(report)) if options.json else format_report(report))


if __name__ == "__main__":
    run_tool(main, DoctorOptions)
