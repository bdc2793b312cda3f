"""Which domains the runs say too little of."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from megatron_chameleon.artifacts import MixtureWarning
from megatron_chameleon.methods.common.table import listed
from megatron_chameleon.mixture.checks import Array

# So many runs with text of a domain are asked for before its figures are believed.
FEW_RUNS = 5


def tell_of_the_rare(
    domains: Sequence[str], mixtures: Array, where: str, remedy: str | None = None
) -> None:
    """Warn of domains that no run has text of, and of those that few have.

    Args:
        domains: k names.
        mixtures: [n, k] of the runs.
        where: what the runs are.
        remedy: what makes them more.
    """
    counts = (mixtures > 0).sum(axis=0).tolist()
    without = [name for name, count in zip(domains, counts, strict=True) if not count]
    few = min(FEW_RUNS, len(mixtures))
    scarce = [name for name, count in zip(domains, counts, strict=True) if 0 < count < few]
    told = []
    if without:
        told.append(
            f"no run has text of {listed(without)}: nothing is known of them, and they get weight 0"
        )
    if scarce:
        told.append(f"fewer than {few} runs have text of {listed(scarce)}: little is known of them")
    if told:
        end = f"; {remedy}" if remedy else ""
        warnings.warn(f"{where}: {'; '.join(told)}{end}", MixtureWarning, stacklevel=3)
