#!/usr/bin/env python3
"""Collect text in named domains from the packages of this environment, as JSON lines."""

from __future__ import annotations

from megatron_chameleon.cli import run_tool
from megatron_chameleon.corpus.options import GatherOptions


def main(options: GatherOptions) -> None:
    """Collect text and print the table of domains."""
    from megatron_chameleon.corpus.installed_text import format_table, gather_installed_text

    print(format_table(gather_installed_text(options)))
    print(f"written to {options.output_dir}")


if __name__ == "__main__":
    run_tool(main, GatherOptions)
