"""Collect text in named domains from the installed packages, as JSON lines."""

from __future__ import annotations

from megatron_chameleon.cli import Tool
from megatron_chameleon.corpus.options import GatherOptions


def main(options: GatherOptions) -> None:
    """Collect text and print the table of domains."""
    from megatron_chameleon.corpus.installed_text import format_table, gather_installed_text

    print(format_table(gather_installed_text(options)))
    print(f"written to {options.output_dir}")


COMMAND = Tool(main, GatherOptions)
