"""DoReMi: raise the weight of domains where a proxy's loss exceeds a reference model's.

Xie et al.: DoReMi, NeurIPS 2023.
"""

from __future__ import annotations

from megatron_chameleon.errors import STOPPED_STATUS
from megatron_chameleon.methods.doremi.options import DoremiOptions
from megatron_chameleon.methods.method import Method


def run(options: DoremiOptions) -> int | None:
    """Train reference and proxy, and write the mixture."""
    from megatron_chameleon.methods.doremi.compute import Doremi

    return None if Doremi.compute(options) else STOPPED_STATUS


METHOD = Method(
    name="doremi",
    options=DoremiOptions,
    compute=run,
    summary="mean weights of a proxy that upweights domains of high excess loss over a reference",
    needs="nothing besides the corpus; a finished run can be the reference (--reference)",
    cost="two training runs, and two forward passes over each batch of the second",
    good_for="one set of domains, with text that a small model can still learn",
    source="Xie et al.: DoReMi, NeurIPS 2023",
)
