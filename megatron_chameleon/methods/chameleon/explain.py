"""``--explain``: similarities, scores and the effect of each hyperparameter, as tables."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

import numpy as np

from megatron_chameleon.methods.chameleon.weights import DomainWindows, Prior, weigh_means
from megatron_chameleon.methods.output import align_columns, format_weight
from megatron_chameleon.mixture import Mode, Recipe, WeightResult, correlations, nearest_rows

WIDTH = 100
# Of more domains, those with the largest weights are shown, and the nearest pairs of all.
MAX_DOMAINS, MAX_PAIRS = 20, 10
MAX_NAME = 14
NUM_NEAREST = 2


def explain(
    names: Sequence[str], windows: DomainWindows, mode: Mode, recipe: Recipe, prior: Prior
) -> str:
    """Three tables of at most 100 columns, each under a paragraph that defines its columns.

    The weights do not include the effect of ``--keep`` and ``--max-epochs``.

    Args:
        names: the k domains.
        windows: of these domains.
        mode: "pretrain" or "finetune".
        recipe: with user-supplied hyperparameters.
        prior: of the target.
    """
    result = weigh_means(windows.means, mode, recipe, prior)
    shown = np.argsort(-result.weights, kind="stable")[:MAX_DOMAINS]
    if len(names) <= MAX_DOMAINS:
        shown = np.arange(len(names))
    # Numbers keep names apart that are cut to the same text.
    cut = [n if len(n) <= MAX_NAME else f"{n[: MAX_NAME - 2]}.." for n in names]
    labels = [f"{number} {name}" for number, name in enumerate(cut, start=1)]
    tables = [
        _similarities(labels, result),
        _scores(labels, shown, result),
        _hyperparameters(labels, shown, windows, result, prior),
    ]
    return "\n\n".join(
        "\n".join([textwrap.fill(head, WIDTH, break_on_hyphens=False), *rows])
        for head, rows in tables
    )


def _similarities(labels: list[str], result: WeightResult) -> tuple[str, list[str]]:
    """Cosines of all domains, or of the nearest pairs of many."""
    centered = " minus their mean" if result.recipe.center else ""
    heading = f"SIMILARITY: 100 x cosine of the domain embeddings{centered}."
    if len(labels) <= MAX_DOMAINS:
        cosines = 100 * correlations(result.features)
        width = max(map(len, labels))
        numbers = "".join(f"{number:4}" for number in range(1, 1 + len(labels)))
        rows = ["".join(f"{value:4.0f}" for value in row) for row in cosines]
        lines = [f"{label:{width}}{row}" for label, row in zip(labels, rows, strict=True)]
        return heading, [" " * width + numbers, *lines]
    positions, nearest = nearest_rows(result.features, 1)
    pairs = {
        (min(i, j), max(i, j)): cosine
        for i, (j, cosine) in enumerate(
            zip(positions[:, 0].tolist(), nearest[:, 0].tolist(), strict=True)
        )
    }
    ranked = sorted(pairs.items(), key=lambda pair: -pair[1])[:MAX_PAIRS]
    cells = [[f"{labels[i]} and {labels[j]}", f"{100 * c:.0f}"] for (i, j), c in ranked]
    return f"{heading} The nearest pairs:", align_columns(cells)


def _scores(labels: list[str], shown: np.ndarray, result: WeightResult) -> tuple[str, list[str]]:
    """What each weight is computed from."""
    num_domains, num_features = result.features.shape
    max_dimension = min(num_domains - int(result.recipe.center), num_features)
    heading = (
        f"SCORES: ridge leverage scores, 0 to 1: how little the other domains explain of a domain; "
        f"{'lower' if result.mode == 'pretrain' else 'higher'} scores give more weight. Size: the "
        f"share of the squared norms. Effective dimension (sum of the scores): "
        f"{result.effective_dimension:.3g} of {max_dimension}, with ridge "
        f"{result.effective_ridge:.3g}; near 0 the scores follow the sizes, near the maximum they "
        "are all alike."
    )
    norms = np.square(result.features).sum(axis=1)
    sizes = norms / (norms.sum() or 1.0)
    shares = result.scores / (result.scores.sum() or 1.0)
    positions, cosines = nearest_rows(result.features, NUM_NEAREST, shown)
    columns = {
        "size": [f"{size:.1%}" for size in sizes],
        "score": [f"{score:.3g}" for score in result.scores],
        "of sum": [f"{share:.1%}" for share in shares],
        "prior": [] if result.prior is None else [f"{value:.2f}" for value in result.prior],
        "weight": [format_weight(weight) for weight in result.weights],
    }
    columns = {name: cells for name, cells in columns.items() if cells}
    nearest = [
        ", ".join(f"{labels[j]} ({100 * cosine:.0f})" for j, cosine in zip(*row, strict=True))
        for row in zip(positions.tolist(), cosines.tolist(), strict=True)
    ]
    lines = _table(labels, shown, columns)
    ends = ["nearest domains", *nearest]
    lines[: len(ends)] = [f"{line}  {end}".rstrip() for line, end in zip(lines, ends, strict=False)]
    return heading, lines


def _hyperparameters(
    labels: list[str],
    shown: np.ndarray,
    windows: DomainWindows,
    result: WeightResult,
    prior: Prior,
) -> tuple[str, list[str]]:
    """The weights with one hyperparameter changed at a time."""
    recipe, mode = result.recipe, result.mode
    weights = {"now": result.weights}
    for name, changes in _changes(recipe).items():
        changed = dataclasses.replace(recipe, **changes)  # type: ignore[arg-type]
        weights[name] = weigh_means(windows.means, mode, changed, prior).weights
    weights["half win."] = weigh_means(windows.means_of_half, mode, recipe, prior).weights
    heading = (
        f"HYPERPARAMETERS: weights after one change: of --ridge (now "
        f"{result.effective_ridge:.3g}), --temperature (now {result.effective_temperature:.3g}), "
        "--center or --normalize, or with half of the windows. Last row: the share of the weight "
        "that moves. Changes of --layer and --window-length need another --store."
    )
    columns = {name: [format_weight(value) for value in column] for name, column in weights.items()}
    moved = [f"{np.abs(column - result.weights).sum() / 2:.1%}" for column in weights.values()]
    return heading, _table(labels, shown, columns, ["moved", *moved])


def _changes(recipe: Recipe) -> dict[str, dict[str, float | bool]]:
    """Column -> changed fields of ``recipe``."""
    temperatures = {
        name: {
            f"temperature_{mode}": factor * getattr(recipe, f"temperature_{mode}")
            for mode in ("pretrain", "finetune")
        }
        for name, factor in (("temp/2", 0.5), ("temp*2", 2.0))
    }
    changes: dict[str, dict[str, float | bool]] = {
        "ridge/10": {"ridge": recipe.ridge / 10},
        "ridge*10": {"ridge": recipe.ridge * 10},
        **temperatures,
        "uncenter" if recipe.center else "center": {"center": not recipe.center},
    }
    if not recipe.temperature_relative:  # which requires normalized scores
        flipped = "raw score" if recipe.normalize else "normalize"
        changes[flipped] = {"normalize": not recipe.normalize}
    return changes


def _table(
    labels: list[str], shown: np.ndarray, columns: dict[str, list[str]], *last: list[str]
) -> list[str]:
    rows = [[labels[i], *(cells[i] for cells in columns.values())] for i in shown.tolist()]
    lines = align_columns([["domain", *columns], *rows, *last])
    hidden = len(labels) - len(shown)
    return [*lines, f"... and {hidden:,} domains with less weight"] if hidden else lines
