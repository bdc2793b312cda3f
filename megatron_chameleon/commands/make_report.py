"""Write and print the report of a run folder.

For example: ``megatron-chameleon make_report runs/quickstart``.
"""

from __future__ import annotations

from megatron_chameleon.cli import Tool
from megatron_chameleon.report.options import ReportOptions


def main(options: ReportOptions) -> None:
    """Write and print the report of a run folder."""
    from megatron_chameleon.report.page import make_report

    make_report(
        *options.runs,
        baseline=options.baseline,
        output=options.output,
        projection=options.projection,
    )


COMMAND = Tool(main, ReportOptions)
