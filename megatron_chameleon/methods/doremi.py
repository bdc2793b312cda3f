"""DoReMi: the domains on which a proxy is behind a reference model of its own size gain weight.

Xie et al.: DoReMi, NeurIPS 2023.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.errors import STOPPED_STATUS
from megatron_chameleon.methods.common.method import Method
from megatron_chameleon.options.doremi import DoremiRule
from megatron_chameleon.options.mixture import MethodOptions
from megatron_chameleon.options.proxy import ProxyOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoremiOptions(MethodOptions):
    """Train a reference, then a proxy whose loss weighs domains by how far it is behind it.

    The weights are the mean over the proxy's steps. The same command goes on where it was stopped.
    """

    work_dir: Path | None = None
    """Folder of the two runs, reference and proxy; the output without .json unless given."""
    reference: Path | None = None
    """A finished run to compare with, of the same tokenizer and sequence length, and of any size;
    unless given, one is trained by the options of the proxy."""
    reference_mixture: str | None = None
    """What the reference is trained by: 'uniform' (which it is unless given), 'natural' for the
    domains' shares of the tokens, or the path of a mixture.json."""
    reference_model_size: str | None = None
    """Name of the reference's model size; the proxy's unless given."""
    rule: DoremiRule = dataclasses.field(default_factory=DoremiRule)
    proxy: ProxyOptions = dataclasses.field(default_factory=ProxyOptions)


def compute(options: DoremiOptions) -> int | None:
    """Train what is to be trained and write the mixture."""
    from megatron_chameleon.methods.excess_loss.compute import compute_doremi

    return None if compute_doremi(options) else STOPPED_STATUS


METHOD = Method(
    name="doremi",
    options=DoremiOptions,
    compute=compute,
    summary="mean weights of a proxy that counts most where it is behind a reference",
    needs="nothing beside the corpus; a finished run can be the reference (--reference)",
    cost="two training runs, and two forward passes over each batch of the second",
    good_for="one set of domains, with text that a small model can still learn",
    source="Xie et al.: DoReMi, NeurIPS 2023",
)
