"""What ``--target`` asks for: domains by name, or a text that counts the nearest ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.named_share import name_and_share
from megatron_chameleon.methods.common.table import listed
from megatron_chameleon.mixture import similarity_shares, target_prior
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.target import DEFAULT_STRENGTH

TEXT_SUFFIXES = (".txt", ".jsonl")


@dataclasses.dataclass(frozen=True)
class Target:
    """A checked ``--target``: either ``shares`` or ``text``."""

    given: str
    strength: float
    shares: dict[str, float] | None = None
    """Domain -> its share of the target; those that are not here have none."""
    text: Path | None = None

    def prior(
        self, names: Sequence[str], vector: NDArray[np.floating] | None
    ) -> Callable[[Array], Array]:
        """The map from domain embeddings [k, h], in the order of ``names``, to the prior [k].

        Args:
            names: the domains.
            vector: [h] the text's embedding; none for named domains.
        """
        if vector is not None:
            return lambda means: target_prior(similarity_shares(means, vector), self.strength)
        shares = self.shares or {}
        fixed = target_prior([shares.get(name, 0.0) for name in names], self.strength)
        return lambda means: fixed


def resolve_target(
    given: str | None, strength: float | None, names: Sequence[str]
) -> Target | None:
    """The target that the options name, among the domains ``names``; None without one.

    Raises:
        UserError: for a strength out of range, an unknown domain, a share that is not a number
            above 0, or a text that is not there.
    """
    if given is None:
        if strength is not None:
            raise UserError(f"--target-strength {strength:g} is that of a --target: give one too")
        return None
    checked = DEFAULT_STRENGTH if strength is None else strength
    if not 0 < checked < 1:
        raise UserError(f"--target-strength {checked:g}: it lies between 0 and 1, both excluded")
    if given not in names and given.endswith(TEXT_SUFFIXES):
        if not Path(given).is_file():
            raise UserError(f"--target {given}: there is no such file; give a text or domains")
        return Target(given, checked, text=Path(given))
    return Target(given, checked, shares=_named_shares(given, names))


def _named_shares(given: str, names: Sequence[str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in filter(None, map(str.strip, given.split(","))):
        name, share = name_and_share(part, given, names)
        if name not in names:
            raise UserError(
                f"--target {given}: there is no domain '{name}' among those that are weighed, "
                f"{listed(names)}; a text ends in {' or '.join(TEXT_SUFFIXES)}"
            )
        if name in shares:
            raise UserError(f"--target {given}: domain '{name}' is there twice; name it once")
        shares[name] = share
    if not shares:
        raise UserError(f"--target {given}: it names no domain; those are {listed(names)}")
    return shares
