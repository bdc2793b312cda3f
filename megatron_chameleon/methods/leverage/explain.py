"""What is behind Chameleon's weights, for the terminal: ``--explain``."""

from __future__ import annotations

import dataclasses
import textwrap
import warnings
from collections.abc import Callable, Sequence

import numpy as np

from megatron_chameleon.methods.common.table import aligned, share_of_tokens
from megatron_chameleon.methods.leverage.domain_windows import DomainWindows
from megatron_chameleon.mixture import (
    DegenerateScoreWarning,
    Mode,
    Recipe,
    WeightResult,
    chameleon_weights,
    correlations,
    nearest_rows,
)
from megatron_chameleon.mixture.checks import Array

WIDTH = 100
# All of at most so many domains are shown; of more, those with the largest weights.
MOST_SHOWN = 20
PAIRS_SHOWN = 10
LONGEST_NAME = 14
NEAREST = 2

Prior = Callable[[Array], Array] | None


def explanation(
    names: Sequence[str], windows: DomainWindows, mode: Mode, recipe: Recipe, prior: Prior
) -> str:
    """Blocks of at most 100 columns, each under a line that says what it shows.

    The weights are those before ``--keep`` and ``--max-epochs``.

    Args:
        names: the k domains.
        windows: of these domains.
        mode: "pretrain" or "finetune".
        recipe: after the user's knobs.
        prior: the target's, from embeddings [k, h] to [k].
    """
    result = _weigh(windows.means, mode, recipe, prior)
    short = _short_names(names)
    shown = np.argsort(-result.weights, kind="stable")[:MOST_SHOWN]
    if len(names) <= MOST_SHOWN:
        shown = np.arange(len(names))
    blocks = [
        _likeness(short, result),
        _scores(short, shown, result),
        _knobs(short, shown, windows, result, prior),
    ]
    return "\n\n".join(blocks)


def _weigh(means: Array, mode: Mode, recipe: Recipe, prior: Prior) -> WeightResult:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateScoreWarning)  # told with the weights themselves
        eta = None if prior is None else prior(means)
        return chameleon_weights(means, mode, recipe, prior=eta)


def _short_names(names: Sequence[str]) -> list[str]:
    """Names that fit, numbered so that two that are cut alike stay apart."""
    cut = [n if len(n) <= LONGEST_NAME else f"{n[: LONGEST_NAME - 2]}.." for n in names]
    return [f"{number} {name}" for number, name in enumerate(cut, start=1)]


def _paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _likeness(short: list[str], result: WeightResult) -> str:
    """Block 1: the affinity as correlations, or the nearest pairs of many domains."""
    less = ", less the mean of all" if result.recipe.center else ""
    meaning = (
        f"HOW ALIKE the domains are: 100 x the cosine of their embeddings{less}. 100 is the same "
        "direction, 0 unrelated, -100 opposite."
    )
    if len(short) > MOST_SHOWN:
        return f"{_paragraph(f'{meaning} The nearest pairs:')}\n{_pairs(short, result.features)}"
    cosines = correlations(result.features)
    rows = [["", *(str(1 + column) for column in range(len(short)))]]
    rows += [
        [name, *(f"{100 * value:.0f}" for value in row)]
        for name, row in zip(short, cosines, strict=True)
    ]
    width = 4  # "-100" fills it only where the domain to the left is another's opposite
    label = max(map(len, short))
    lines = [row[0].ljust(label) + "".join(cell.rjust(width) for cell in row[1:]) for row in rows]
    return "\n".join([_paragraph(meaning), *lines])


def _pairs(short: list[str], features: Array) -> str:
    positions, cosines = nearest_rows(features, 1)
    best = {
        (min(one, other), max(one, other)): cosine
        for one, (other, cosine) in enumerate(
            zip(positions[:, 0].tolist(), cosines[:, 0].tolist(), strict=True)
        )
    }
    ranked = sorted(best.items(), key=lambda pair: -pair[1])[:PAIRS_SHOWN]
    return "\n".join(
        aligned([[f"{short[i]} and {short[j]}", f"{100 * c:.0f}"] for (i, j), c in ranked])
    )


def _scores(short: list[str], shown: np.ndarray, result: WeightResult) -> str:
    """Block 2: what each weight is made of."""
    direction = (
        "the lower, the more weight" if result.mode == "pretrain" else "the higher, the more weight"
    )
    meaning = (
        f"SCORES: how hard a domain is to make out of the others, from 0 to 1; {direction}. "
        "Size is its part of the sum of squared norms; a far-out domain has a large one."
    )
    norms = np.square(result.features).sum(axis=1)
    sizes = norms / (norms.sum() or 1.0)
    shares = result.scores / (result.scores.sum() or 1.0)
    positions, cosines = nearest_rows(result.features, NEAREST, shown)
    prior = [] if result.prior is None else ["prior"]
    rows = [["domain", "size", "score", "of sum", *prior, "weight", "nearest domains"]]
    for number, i in enumerate(shown.tolist()):
        near = zip(positions[number].tolist(), cosines[number].tolist(), strict=True)
        rows.append(
            [
                short[i],
                f"{sizes[i]:.1%}",
                f"{result.scores[i]:.3g}",
                f"{shares[i]:.1%}",
                *([] if result.prior is None else [f"{result.prior[i]:.2f}"]),
                share_of_tokens(result.weights[i]),
                ", ".join(f"{short[j]} ({100 * cosine:.0f})" for j, cosine in near),
            ]
        )
    dimension = (
        f"Effective dimension (sum of the scores): {result.effective_dimension:.3g} of at most "
        f"{_most_dimensions(result)}, at the ridge {result.effective_ridge:.3g}. Near 0 the ridge "
        "outweighs the embeddings and scores go with size; near the most, all scores are alike."
    )
    return "\n".join([_paragraph(meaning), *_left_last(rows), *_more(short), _paragraph(dimension)])


def _most_dimensions(result: WeightResult) -> int:
    num_domains, num_features = result.features.shape
    return min(num_domains - int(result.recipe.center), num_features)


def _left_last(rows: list[list[str]]) -> list[str]:
    """Aligned rows, the last column to the left."""
    lines = aligned([row[:-1] for row in rows])
    return [f"{line}  {row[-1]}".rstrip() for line, row in zip(lines, rows, strict=True)]


def _more(short: list[str]) -> list[str]:
    hidden = len(short) - MOST_SHOWN
    return [f"... and {hidden:,} domains of less weight"] if hidden > 0 else []


def _knobs(
    short: list[str],
    shown: np.ndarray,
    windows: DomainWindows,
    result: WeightResult,
    prior: Prior,
) -> str:
    """Block 3: the weights with one thing changed at a time."""
    recipe, mode = result.recipe, result.mode
    columns: dict[str, Array | None] = {"as it is": result.weights}
    for heading, changed in _variants(recipe).items():
        columns[heading] = (
            None if changed is None else _weigh(windows.means, mode, changed, prior).weights
        )
    columns["half win."] = _weigh(windows.means_of_half, mode, recipe, prior).weights
    rows = [["domain", *columns]]
    rows += [[short[i], *map(_cell, columns.values(), [i] * len(columns))] for i in shown.tolist()]
    rows.append(["moved", *(_moved(column, result.weights) for column in columns.values())])
    tau = f"{result.effective_temperature:.3g}"
    meaning = (
        f"KNOBS: the weights with one thing changed: --ridge (now {result.effective_ridge:.3g}), "
        f"--temperature (now {tau}), {_flag('center', recipe.center)}, "
        f"{_flag('normalize', recipe.normalize)}, or half of the windows. The last row is the part "
        "of all weight that moves."
    )
    notes = [
        "Another --layer or --window-length needs the domains embedded again, into another --store."
    ]
    if any(column is None for column in columns.values()):
        notes.append("-: the recipe's relative temperature needs normalised scores.")
    return "\n".join([_paragraph(meaning), *aligned(rows), *_more(short), *notes])


def _variants(recipe: Recipe) -> dict[str, Recipe | None]:
    """Heading -> the recipe with one knob turned; None for one that no recipe can have."""

    def temperature(factor: float) -> Recipe:
        return dataclasses.replace(
            recipe,
            temperature_pretrain=factor * recipe.temperature_pretrain,
            temperature_finetune=factor * recipe.temperature_finetune,
        )

    may_flip = not (recipe.normalize and recipe.temperature_relative)
    return {
        "ridge/10": dataclasses.replace(recipe, ridge=recipe.ridge / 10),
        "ridge*10": dataclasses.replace(recipe, ridge=recipe.ridge * 10),
        "temp/2": temperature(0.5),
        "temp*2": temperature(2.0),
        "uncenter" if recipe.center else "center": dataclasses.replace(
            recipe, center=not recipe.center
        ),
        "raw score" if recipe.normalize else "normalize": (
            dataclasses.replace(recipe, normalize=not recipe.normalize) if may_flip else None
        ),
    }


def _flag(name: str, now: bool) -> str:
    return f"--{'no-' if now else ''}{name}"


def _cell(column: Array | None, row: int) -> str:
    return "-" if column is None else share_of_tokens(column[row])


def _moved(column: Array | None, now: Array) -> str:
    """Half of the sum of absolute differences: the weight that goes from some domains to others."""
    return "-" if column is None else f"{np.abs(column - now).sum() / 2:.1%}"
