"""Report active accelerating libraries, and features that have run on a CUDA device."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megatron_chameleon.cli import Tool


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Report which accelerating libraries are active, and the cost of missing libraries."""

    json: bool = False
    """Print one JSON object instead of text."""


def main(options: DoctorOptions) -> None:
    """Print the report; the exit status is always 0."""
    from megatron_chameleon.parallel.acceleration import acceleration_report, format_report

    report = acceleration_report(Path(__file__).resolve().parents[2])
    print(json.dumps(dataclasses.asdict(report)) if options.json else format_report(report))


COMMAND = Tool(main, DoctorOptions)
