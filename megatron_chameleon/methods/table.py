"""A mixture as a table for the terminal, whatever method found it."""

from __future__ import annotations

from collections.abc import Callable

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.mixture import windows_needed


def mixture_table(mixture: Mixture) -> str:
    """One row a domain: what the method knows of it, its weight, and what the weight implies."""
    columns: list[tuple[str, Callable[[str], str]]] = []
    if windows := mixture.parameters.get("windows"):
        columns.append(("windows", lambda name: f"{windows[name]}"))
    if scores := mixture.scores:
        columns.append(("score", lambda name: f"{scores[name]:.3g}"))
    if unconstrained := mixture.unconstrained:
        columns.append(("without limit", lambda name: f"{unconstrained[name]:.4f}"))
    columns.append(("weight", lambda name: f"{mixture.weights[name]:.4f}"))
    if intervals := mixture.intervals:
        heading = f"{100 * (mixture.confidence or 0):g}% interval"
        columns.append((heading, lambda name: "{:.4f} to {:.4f}".format(*intervals[name])))
    if epochs := mixture.epochs:
        columns.append(("epochs", lambda name: f"{epochs[name]:.2f}"))
    rows = [["domain", *(heading for heading, _ in columns)]]
    rows += [[name, *(cell(name) for _, cell in columns)] for name in mixture.weights]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def closing_words(mixture: Mixture, precision: float) -> str:
    """Lines under the table: how sure the order is, what more windows would do, what limits did."""
    return "\n".join([*_order(mixture), *_windows_for(mixture, precision), *_limit(mixture)])


def _order(mixture: Mixture) -> list[str]:
    if not mixture.outweighs:
        return []
    one, other, likely = min(mixture.outweighs, key=lambda pair: pair[2])
    return [f"least sure of the order: {one} outweighs {other} in {likely:.0%} of the resamples"]


def _windows_for(mixture: Mixture, precision: float) -> list[str]:
    windows = mixture.parameters.get("windows")
    if not (mixture.intervals and windows):
        return []
    half_width = max(high - low for low, high in mixture.intervals.values()) / 2
    fewest = min(windows.values())
    needed = windows_needed(half_width, fewest, precision)
    verdict = "are enough" if needed <= fewest else f"are few, about {needed:,} would do"
    wanted = f"for +-{precision:g}, {fewest:,} windows of a domain {verdict}"
    return [f"widest interval: +-{half_width:.4f}; {wanted}"]


def _limit(mixture: Mixture) -> list[str]:
    if mixture.max_epochs is None:
        return []
    limit = f"{mixture.max_epochs:g} epochs"
    if not mixture.capped:
        return [f"no domain comes to the limit of {limit}"]
    return [f"held at the limit of {limit}: {', '.join(mixture.capped)}"]
