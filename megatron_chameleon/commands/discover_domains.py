"""Find domains in text without labels.

N ranks: ``torchrun --nproc-per-node N -m megatron_chameleon discover_domains ...``.
"""

from __future__ import annotations

from megatron_chameleon.cli import Tool
from megatron_chameleon.methods.discovery import DiscoverOptions


def main(options: DiscoverOptions) -> None:
    """Cluster documents, and write a corpus with one domain per cluster."""
    from megatron_chameleon.methods.discovery.discover import discover_domains

    discover_domains(options)


COMMAND = Tool(main, DiscoverOptions)
