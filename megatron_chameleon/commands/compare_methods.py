"""Compare methods in one table, as the last stage of examples/compare_methods.sh."""

from __future__ import annotations

from megatron_chameleon.cli import Tool
from megatron_chameleon.report.options import CompareMethodsOptions


def main(options: CompareMethodsOptions) -> None:
    """Write the comparison of methods, or only check that it is possible."""
    from megatron_chameleon.methods.method import find_methods
    from megatron_chameleon.methods.online.options import online_columns
    from megatron_chameleon.report.compare_methods import (
        compare_methods,
        require_choice,
        require_results,
    )

    if options.check == "choice":
        require_choice(options, {*find_methods(), *online_columns()})
    elif options.check is not None:
        require_results(options)
    elif options.targets is not None:
        from megatron_chameleon.report.targets import compare_targets

        compare_targets(options)
    else:
        compare_methods(options)


COMMAND = Tool(main, CompareMethodsOptions)
