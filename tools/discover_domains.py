#!/usr/bin/env python3
"""Find domains in text without labels: torchrun --nproc-per-node N tools/discover_domains.py ..."""

from __future__ import annotations

from megatron_chameleon.cli import run_tool
from megatron_chameleon.methods.discovery import DiscoverOptions


def main(options: DiscoverOptions) -> None:
    """Cluster documents, and write a corpus with one domain per cluster."""
    from megatron_chameleon.methods.discovery.discover import discover_domains

    discover_domains(options)


if __name__ == "__main__":
    run_tool(main, DiscoverOptions)
