"""A mixture as a table for the terminal, whatever method found it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.mixture import windows_needed

# Of more domains than MOST_ROWS the heaviest and the lightest are shown.
MOST_ROWS = 40
HEAVIEST, LIGHTEST = 25, 10
MOST_LISTED = 10
SMALL_WEIGHT = 1e-3


def listed(names: Sequence[str]) -> str:
    """Names for a message: the first ten, and how many there are beside them."""
    shown = ", ".join(names[:MOST_LISTED])
    return f"{shown} and {len(names) - MOST_LISTED:,} more" if len(names) > MOST_LISTED else shown


def share_of_tokens(weight: float) -> str:
    """A weight with four digits after the point, or by its power of ten where these say little."""
    return f"{weight:.4f}" if weight == 0 or weight >= SMALL_WEIGHT else f"{weight:.1e}"


def mixture_table(mixture: Mixture) -> str:
    """One row a domain: what the method knows of it, its weight, and what the weight implies.

    Of more than ``MOST_ROWS`` domains, the heaviest and the lightest ones in the order of weights.
    """
    columns: list[tuple[str, Callable[[str], str]]] = []
    if windows := mixture.parameters.get("windows"):
        columns.append(("windows", lambda name: f"{windows[name]}"))
    if scores := mixture.scores:
        columns.append(("score", lambda name: f"{scores[name]:.3g}"))
    if target := mixture.parameters.get("target"):
        prior, without = target["prior"], target["weights_without"]
        columns.append(("prior", lambda name: f"{prior[name]:.2f}"))
        columns.append(("without target", lambda name: share_of_tokens(without[name])))
    if unconstrained := mixture.unconstrained:
        columns.append(("without limit", lambda name: share_of_tokens(unconstrained[name])))
    columns.append(("weight", lambda name: share_of_tokens(mixture.weights[name])))
    if intervals := mixture.intervals:
        heading = f"{100 * (mixture.confidence or 0):g}% interval"
        columns.append((heading, lambda name: " to ".join(map(share_of_tokens, intervals[name]))))
    if epochs := mixture.epochs:
        columns.append(("epochs", lambda name: f"{epochs[name]:.2f}"))
    heavy, light = _shown(mixture)
    headings = ["domain", *(heading for heading, _ in columns)]
    rows = [[name, *(cell(name) for _, cell in columns)] for name in heavy + light]
    lines = aligned([headings, *rows])
    hidden = len(mixture.weights) - len(rows)
    if hidden:
        between = f"... {hidden:,} domains between; the file has all of them"
        lines.insert(1 + len(heavy), between)
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def _shown(mixture: Mixture) -> tuple[list[str], list[str]]:
    """The rows before and after those that are left out."""
    names = list(mixture.weights)
    if len(names) <= MOST_ROWS:
        return names, []
    names.sort(key=lambda name: -mixture.weights[name])
    return names[:HEAVIEST], names[-LIGHTEST:]


def closing_words(mixture: Mixture, precision: float) -> str:
    """Lines under the table: how sure the order is, what more windows would do, what limits did."""
    return "\n".join([*_order(mixture), *_windows_for(mixture, precision), *limit_told(mixture)])


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
    return [f"widest interval: +-{share_of_tokens(half_width)}; {wanted}"]


def limit_told(mixture: Mixture) -> list[str]:
    """What the limit of epochs did, in a line, if there is one."""
    if mixture.max_epochs is None:
        return []
    limit = f"{mixture.max_epochs:g} epochs"
    if not mixture.capped:
        return [f"no domain comes to the limit of {limit}"]
    return [f"held at the limit of {limit}: {listed(mixture.capped)}"]
