"""Measure how stable a mixture is.

N ranks: ``torchrun --nproc-per-node N -m megatron_chameleon sweep_mixture ...``.
"""

from __future__ import annotations

from megatron_chameleon.cli import Tool
from megatron_chameleon.errors import STOPPED_STATUS
from megatron_chameleon.methods.sweep import SharedSweepOptions
from megatron_chameleon.methods.sweep.options import SweepOptions
from megatron_chameleon.parallel.options import is_rank_0


def main(options: SharedSweepOptions) -> int | None:
    """Compute the mixtures and report their distances; return the exit status."""
    from megatron_chameleon.methods.sweep.sweep import sweep_mixture
    from megatron_chameleon.report.page import report_stability

    sweep = sweep_mixture(options)
    if sweep is None:
        return STOPPED_STATUS
    if is_rank_0():
        report_stability(sweep)
    return None


COMMAND = Tool(main, SweepOptions)
