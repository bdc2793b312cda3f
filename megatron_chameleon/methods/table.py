"""A mixture as a table for the terminal, whatever method found it."""

from __future__ import annotations

from collections.abc import Callable

from megatron_chameleon.artifacts import Mixture


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


def limit_words(mixture: Mixture) -> str:
    """A line, after a line's end, of what a limit of epochs did; empty without one."""
    if mixture.max_epochs is None:
        return ""
    limit = f"{mixture.max_epochs:g} epochs"
    if not mixture.capped:
        return f"\nno domain comes to the limit of {limit}"
    return f"\nheld at the limit of {limit}: {', '.join(mixture.capped)}"
