"""``--explain``: scores, nearest domains, and the effect of each hyperparameter, as tables."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_chameleon.console import align_columns
from megatron_chameleon.methods.output import format_weight
from megatron_chameleon.mixture import Recipe, WeightResult
from megatron_chameleon.mixture.affinity import nearest_rows

WIDTH = 100
# The tables show at most this many domains: those with the largest weights.
MAX_DOMAINS = 20
MAX_NAME = 12
NUM_NEAREST = 2


def explain(names: Sequence[str], recipe: Recipe, weigh: Callable[[Recipe], WeightResult]) -> str:
    """Return two tables, each under a paragraph that defines its columns.

    Args:
        names: the k domains.
        recipe: recipe of the weights, with user-supplied hyperparameters.
        weigh: function that computes the weights of these domains with a recipe.
    """
    result = weigh(recipe)
    shown = np.argsort(-result.weights, kind="stable")[:MAX_DOMAINS]
    # Truncated names may be equal, so each label also has a number.
    labels = [f"{number} {name[:MAX_NAME]}" for number, name in enumerate(names, start=1)]
    norms = np.square(result.features).sum(axis=1)
    sizes = norms / (norms.sum() or 1.0)
    priors = np.ones(len(names)) if result.prior is None else result.prior
    scores = [["domain", "size", "score", "prior", "weight", "nearest"]]
    nearest = nearest_rows(result.features, NUM_NEAREST, shown)
    for i, positions, cosines in zip(shown, *map(np.ndarray.tolist, nearest), strict=True):
        near = zip(positions, cosines, strict=True)
        scores.append(
            [
                labels[i],
                f"{sizes[i]:.1%}",
                f"{result.scores[i]:.3g}",
                f"{priors[i]:.2f}",
                format_weight(result.weights[i]),
                ", ".join(f"{labels[j]} ({100 * cosine:.0f})" for j, cosine in near),
            ]
        )
    pretrain, finetune = recipe.temperature_pretrain, recipe.temperature_finetune
    changes: dict[str, dict[str, Any]] = {
        "ridge/10": {"ridge": recipe.ridge / 10},
        "ridge*10": {"ridge": recipe.ridge * 10},
        "temp/2": {"temperature_pretrain": pretrain / 2, "temperature_finetune": finetune / 2},
        "temp*2": {"temperature_pretrain": pretrain * 2, "temperature_finetune": finetune * 2},
        "uncenter" if recipe.center else "center": {"center": not recipe.center},
    }
    # A relative temperature requires normalized scores, so there is no column for raw scores.
    if not recipe.temperature_relative:
        flipped = "raw score" if recipe.normalize else "normalize"
        changes[flipped] = {"normalize": not recipe.normalize}
    weights = {"now": result.weights}
    for heading, change in changes.items():
        weights[heading] = weigh(dataclasses.replace(recipe, **change)).weights
    columns = weights.values()
    moved = [f"{np.abs(column - result.weights).sum() / 2:.1%}" for column in columns]
    hyperparameters = [
        ["domain", *weights],
        *([labels[i], *(format_weight(column[i]) for column in columns)] for i in shown),
        ["moved", *moved],
    ]
    rank = min(len(names) - int(recipe.center), result.features.shape[1])
    order = "lower" if result.mode == "pretrain" else "higher"
    paragraphs = [
        "SCORES: ridge leverage scores, 0 to 1. A domain's score is high if the other domains "
        f"explain it poorly; {order} scores give more weight. Size: a domain's "
        f"share of the sum of squared norms{' after centering' if recipe.center else ''}. Nearest: "
        "the domains with the largest cosines, which are shown times 100. The effective dimension "
        "(the sum of the scores) is "
        f"{result.effective_dimension:.3g} of at most {rank}, with ridge "
        f"{result.effective_ridge:.3g}. If it is near 0, scores are nearly proportional to sizes; "
        "if it is near the maximum, all scores are similar.",
        "HYPERPARAMETERS: weights without --keep and --max-epochs. Each column after the first "
        f"changes one of --ridge (now {result.effective_ridge:.3g}), --temperature (now "
        f"{result.effective_temperature:.3g}), --center and --normalize. Last row: the share of "
        "the weight that moves to other domains.",
    ]
    parts = [
        "\n".join([textwrap.fill(paragraph, WIDTH, break_on_hyphens=False), *align_columns(rows)])
        for paragraph, rows in zip(paragraphs, (scores, hyperparameters), strict=True)
    ]
    if len(names) > MAX_DOMAINS:
        parts.append(f"{len(names) - MAX_DOMAINS:,} domains with less weight are not shown.")
    return "\n\n".join(parts)
