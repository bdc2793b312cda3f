#!/usr/bin/env python3
"""Write and print the report of a run folder: python tools/make_report.py runs/quickstart."""

from __future__ import annotations

from megatron_chameleon.cli import run_tool
from megatron_chameleon.report.options import ReportOptions


def main(options: ReportOptions) -> None:
    """Write and print the report of a run folder."""
    from megatron_chameleon.report.page import make_report

    make_report(*options.runs, baseline=options.baseline, output=options.output)


if __name__ == "__main__":
    run_tool(main, ReportOptions)
