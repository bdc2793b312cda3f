"""Given weights on the domains of a corpus: names matched, renamed and left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_chameleon.artifacts.mixture import normalized
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.table import listed
from megatron_chameleon.methods.given.reading import GivenWeights
from megatron_chameleon.mixture.checks import Array


def matched(
    given: GivenWeights, renames: Sequence[str], corpus_names: Sequence[str], names: Sequence[str]
) -> tuple[Array, list[str]]:
    """The weights of ``names``, summing to 1, and what has to be said of how they came about.

    Args:
        given: what a person gave.
        renames: of ``--rename``: OLD=NEW calls the given OLD as the corpus does, OLD= leaves it
            out. Several OLD of one NEW add up.
        corpus_names: all domains there are.
        names: those that are weighed; the weights of the others are dropped.

    Returns:
        [k] float64 in the order of ``names``, and lines for under the table.

    Raises:
        UserError: for a name that is unknown, a weight that cannot be, or if none is left.
    """
    checked = normalized(_scaled(given), given.where)
    moved = _renamed(given, checked, renames, corpus_names)
    kept = {name: moved.get(name, 0.0) for name in names}
    total = math.fsum(kept.values())
    if total <= 0:
        raise UserError(f"{given.where}: it has no weight for any of {listed(list(names))}")
    return np.array(list(kept.values())) / total, _told(given, moved, kept, total)


def _scaled(given: GivenWeights) -> dict[str, float]:
    """Printed columns are divided by their sum without a warning: it is told with the table."""
    total = given.parameters.get("printed_sum", 1.0)
    return {name: weight / total for name, weight in given.weights.items()}


def _renamed(
    given: GivenWeights,
    weights: Mapping[str, float],
    renames: Sequence[str],
    corpus_names: Sequence[str],
) -> dict[str, float]:
    """Weights by the names of the corpus; weights of names that become one add up."""
    table = _rename_table(given, renames, corpus_names)
    there = set(corpus_names)
    elsewhere = {name: own for own, name in given.own_names.items() if own in there}
    names = {
        name: table.get(name, name if name in there else elsewhere.get(name, name))
        for name in weights
    }
    unknown = [name for name, new in names.items() if name not in table and new not in there]
    if unknown:
        raise UserError(_unknown_told(given.where, unknown, corpus_names))
    moved: dict[str, float] = {}
    for name, weight in weights.items():
        if names[name]:
            moved[names[name]] = moved.get(names[name], 0.0) + weight
    return moved


def _unknown_told(where: str, unknown: Sequence[str], corpus_names: Sequence[str]) -> str:
    """All of them in one message, so that one more start is enough."""
    quoted = listed([f"'{name}'" for name in unknown])
    are = "are no domains" if len(unknown) > 1 else "is no domain"
    beside = "add " if len(unknown) == 1 else "for each of them add "
    return (
        f"{where}: {quoted} {are} of the corpus, whose domains are {listed(list(corpus_names))}; "
        f"{beside}--rename {unknown[0]}=NAME, with the corpus's NAME for it, or --rename "
        f"{unknown[0]}= to leave it out"
    )


def _rename_table(
    given: GivenWeights, renames: Sequence[str], corpus_names: Sequence[str]
) -> dict[str, str]:
    """OLD -> NEW of ``--rename``, NEW being empty for what is left out."""
    table: dict[str, str] = {}
    for rename in renames:
        old, equals, new = map(str.strip, rename.partition("="))
        if not equals or old not in given.weights:
            raise UserError(
                f"--rename {rename}: give OLD=NEW, with OLD one of {listed(list(given.weights))}"
            )
        if old in table:
            raise UserError(f"--rename {rename}: '{old}' is renamed twice; give it one name")
        if new and new not in corpus_names:
            raise UserError(
                f"--rename {rename}: the corpus has no domain '{new}'; after the '=' goes one of "
                f"its own, {listed(list(corpus_names))}, or nothing to leave '{old}' out"
            )
        table[old] = new
    return table


def _told(
    given: GivenWeights, moved: Mapping[str, float], kept: Mapping[str, float], total: float
) -> list[str]:
    """Lines for a person: what the printed weights sum to, what was left out, what got nothing."""
    lines = []
    if "printed_sum" in given.parameters:
        lines.append(
            f"{given.parameters['source']}: the printed weights sum to "
            f"{given.parameters['printed_sum']:.4g} and were divided by it"
        )
    if total < 1.0 - 1e-9:
        lines.append(
            f"left out: {1.0 - total:.4f} of the weight; the other domains keep their ratios"
        )
    without = [name for name in kept if name not in moved]
    if without:
        lines.append(f"no weight was given for {listed(without)}: it is 0")
    return lines
