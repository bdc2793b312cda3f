#!/usr/bin/env python3
"""Write and print the head-to-head of methods, as examples/compare_methods.sh does at its end."""

from __future__ import annotations

from megatron_chameleon.cli import run_tool
from megatron_chameleon.options.head_to_head import CompareMethodsOptions


def main(options: CompareMethodsOptions) -> None:
    """Call the report with what the command line asks for, or a check of it."""
    from megatron_chameleon.methods.common.registry import find_methods
    from megatron_chameleon.report.head_to_head import (
        Record,
        Selection,
        report_head_to_head,
        require_choice,
        require_evaluations,
    )

    selection = Selection(
        names=options.mixtures,
        seeds=options.seeds,
        run_suffix=options.run_suffix,
        baseline=options.baseline,
        reference=options.reference,
    )
    record = Record.from_options(options.record, options.command, options.wall_seconds)
    if options.check == "choice":
        require_choice(options.run, selection, find_methods())
    elif options.check == "evaluations":
        require_evaluations(options.run, selection)
    else:
        report_head_to_head(options.run, selection, options.name, record)


if __name__ == "__main__":
    run_tool(main, CompareMethodsOptions)
