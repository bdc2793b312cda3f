"""``--explain``: the printed numbers are those of the plain computation."""

from __future__ import annotations

import dataclasses
import re
import warnings

import numpy as np
import pytest

from megatron_chameleon.methods.chameleon.explain import explain
from megatron_chameleon.methods.chameleon.weights import DomainWindows
from megatron_chameleon.methods.output import format_weight
from megatron_chameleon.mixture import (
    RECIPES,
    DegenerateScoreWarning,
    chameleon_weights,
    correlations,
    target_prior,
)

NAMES = ["books", "code", "a-domain-with-a-long-name", "wiki", "chat"]


def windows_of(count: int, width: int = 16) -> DomainWindows:
    rng = np.random.default_rng(count)
    means = rng.normal(size=(count, width)) * 3 + 5
    halves = means + 0.1 * rng.normal(size=(count, width))
    return DomainWindows(means, halves, list(means[:, None]), (40,) * count, 1)


def weights(means, mode, recipe):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        return chameleon_weights(means, mode, recipe).weights


def table(text: str, title: str) -> list[str]:
    (found,) = [part for part in text.split("\n\n") if part.startswith(title)]
    return found.splitlines()


def row(lines: list[str], name: str) -> list[str]:
    (found,) = [line for line in lines if re.match(rf"\d+ {re.escape(name)} ", line)]
    return found.split()[2:]


@pytest.mark.parametrize("mode", ["pretrain", "finetune"])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_hyperparameters_show_the_weights_after_each_change(mode, name):
    recipe, windows = RECIPES[name], windows_of(5)
    lines = table(explain(NAMES, windows, mode, recipe, None), "HYPERPARAMETERS")
    temperature = f"temperature_{mode}"
    changes = [
        {},
        {"ridge": recipe.ridge / 10},
        {"ridge": recipe.ridge * 10},
        {temperature: getattr(recipe, temperature) * 0.5},
        {temperature: getattr(recipe, temperature) * 2},
        {"center": not recipe.center},
    ]
    if not recipe.temperature_relative:
        changes.append({"normalize": not recipe.normalize})
    columns = [
        weights(windows.means, mode, dataclasses.replace(recipe, **change)) for change in changes
    ]
    columns.append(weights(windows.means_of_half, mode, recipe))
    assert row(lines, "code") == [format_weight(column[1]) for column in columns]
    (moved,) = [line.split() for line in lines if line.startswith("moved")]
    assert moved[1:] == [f"{np.abs(c - columns[0]).sum() / 2:.1%}" for c in columns]


def test_similarities_scores_and_nearest_domains():
    recipe, windows = RECIPES["reference"], windows_of(5)
    prior = target_prior([0, 1, 0, 0, 0])
    text = explain(NAMES, windows, "pretrain", recipe, lambda means: prior)
    result = chameleon_weights(windows.means, "pretrain", recipe, prior=prior)
    cosines = correlations(result.features)
    assert row(table(text, "SIMILARITY"), "wiki") == [f"{100 * value:.0f}" for value in cosines[3]]
    norms = np.diagonal(result.affinity)
    shown = row(table(text, "SCORES"), "wiki")
    assert shown[:5] == [
        f"{norms[3] / norms.sum():.1%}",
        f"{result.scores[3]:.3g}",
        f"{result.scores[3] / result.scores.sum():.1%}",
        f"{prior[3]:.2f}",
        f"{result.weights[3]:.4f}",
    ]
    others = sorted({0, 1, 2, 4}, key=lambda j: -cosines[3, j])
    assert [shown[5], shown[8]] == [str(1 + others[0]), str(1 + others[1])]
    assert f"{result.effective_dimension:.3g} of 4" in text.replace("\n", " ")


@pytest.mark.parametrize("count", [1, 2, 20, 21, 120])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_it_fits_100_columns_for_any_number_of_domains(count, name):
    names = [f"a-domain-with-a-long-name-{number}" for number in range(count)]
    text = explain(names, windows_of(count), "pretrain", RECIPES[name], None)
    assert max(map(len, text.splitlines())) <= 100
    pairs = [line for line in text.splitlines() if re.match(r"\d+ .* and \d+ ", line)]
    assert len(pairs) == (10 if count > 20 else 0)
    assert text.count(f"... and {count - 20} domains") == (2 if count > 20 else 0)


def test_identical_domains():
    windows = windows_of(4)
    same = dataclasses.replace(windows, means=np.ones((4, 16)), means_of_half=np.ones((4, 16)))
    text = explain(NAMES[:4], same, "pretrain", RECIPES["reference"], None)
    assert row(table(text, "HYPERPARAMETERS"), "code")[:3] == ["0.2500"] * 3
