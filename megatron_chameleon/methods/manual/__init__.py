"""Known weights as a mixture: from the command line, a file, or a column of Chameleon's tables."""

from __future__ import annotations

from megatron_chameleon.methods.manual.options import ManualOptions
from megatron_chameleon.methods.method import Method


def run(options: ManualOptions) -> None:
    """Write known weights as a mixture."""
    from megatron_chameleon.methods.manual.compute import compute_manual

    compute_manual(options)


METHOD = Method(
    name="manual",
    options=ManualOptions,
    compute=run,
    summary="known weights: from the command line, a file, or a printed column of the paper",
    needs="the weights (--weights or --published)",
    cost="nothing; for a mixture file, the cost recorded in it",
    good_for="a mixture from elsewhere, and the paper's own (--published slimpajama/doremi)",
    source="",
)
