"""Uniform: the same share of the tokens for every domain."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.methods.common.method import Method
from megatron_chameleon.options.mixture import ChosenDomainsOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformOptions(ChosenDomainsOptions):
    """Give every domain the same weight."""


def compute(options: UniformOptions) -> None:
    """Write 1/k for each of k domains."""
    import numpy as np

    from megatron_chameleon.methods.common.model_free import Assigned, write_model_free

    write_model_free(
        METHOD.name,
        options,
        lambda corpus, names: Assigned(
            np.full(len(names), 1.0 / len(names)),
            f"Uniform: {len(names)} domains alike",
            paper_flops=0.0,
        ),
    )


METHOD = Method(
    name="uniform",
    options=UniformOptions,
    compute=compute,
    summary="the same weight for every domain",
    needs="nothing beside the corpus",
    cost="nothing",
    good_for="a first run, and what every other mixture is measured against",
    source="",
)
"""What every other method is compared with."""
