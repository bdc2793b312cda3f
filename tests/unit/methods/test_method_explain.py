"""``--explain``: every number is the one of the plain computation."""

from __future__ import annotations

import dataclasses
import re
import warnings

import numpy as np
import pytest

from megatron_chameleon.methods.common.table import share_of_tokens
from megatron_chameleon.methods.leverage.domain_windows import DomainWindows
from megatron_chameleon.methods.leverage.explain import explanation
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


def weights(means, mode, recipe, prior=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        return chameleon_weights(means, mode, recipe, prior=prior).weights


def block(text: str, title: str) -> list[str]:
    (found,) = [part for part in text.split("\n\n") if part.startswith(title)]
    return found.splitlines()


def row(lines: list[str], name: str) -> list[str]:
    (found,) = [line for line in lines if re.match(rf"\d+ {re.escape(name)} ", line)]
    return found.split()[2:]


@pytest.mark.parametrize("mode", ["pretrain", "finetune"])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_each_knob_shows_the_weights_it_would_give(mode, name):
    recipe, windows = RECIPES[name], windows_of(5)
    lines = block(explanation(NAMES, windows, mode, recipe, None), "KNOBS")

    def temperature(factor):
        return dataclasses.replace(
            recipe,
            temperature_pretrain=recipe.temperature_pretrain * factor,
            temperature_finetune=recipe.temperature_finetune * factor,
        )

    changed = [
        recipe,
        dataclasses.replace(recipe, ridge=recipe.ridge / 10),
        dataclasses.replace(recipe, ridge=recipe.ridge * 10),
        temperature(0.5),
        temperature(2),
        dataclasses.replace(recipe, center=not recipe.center),
    ]
    columns = [weights(windows.means, mode, one) for one in changed]
    if name == "scaled":
        assert "needs normalised scores" in lines[-1]
        assert row(lines, "code")[6] == "-"
    else:
        flipped = dataclasses.replace(recipe, normalize=not recipe.normalize)
        columns.append(weights(windows.means, mode, flipped))
    shown = row(lines, "code")
    expected = [share_of_tokens(column[1]) for column in columns]
    assert shown[: len(expected)] == expected
    assert shown[-1] == share_of_tokens(weights(windows.means_of_half, mode, recipe)[1])
    (moved,) = [line.split() for line in lines if line.startswith("moved")]
    for told, column in zip(moved[1:], columns, strict=False):
        assert told == f"{np.abs(column - columns[0]).sum() / 2:.1%}"


def test_likeness_scores_and_nearest_are_those_of_the_affinity():
    recipe, windows = RECIPES["reference"], windows_of(5)
    prior = target_prior([0, 1, 0, 0, 0])
    text = explanation(NAMES, windows, "pretrain", recipe, lambda means: prior)
    result = chameleon_weights(windows.means, "pretrain", recipe, prior=prior)
    cosines = correlations(result.features)
    assert row(block(text, "HOW ALIKE"), "wiki") == [f"{100 * value:.0f}" for value in cosines[3]]
    lines = block(text, "SCORES")
    norms = np.diagonal(result.affinity)
    shown = row(lines, "wiki")
    assert shown[:5] == [
        f"{norms[3] / norms.sum():.1%}",
        f"{result.scores[3]:.3g}",
        f"{result.scores[3] / result.scores.sum():.1%}",
        f"{prior[3]:.2f}",
        f"{result.weights[3]:.4f}",
    ]
    others = sorted({0, 1, 2, 4}, key=lambda j: -cosines[3, j])
    assert [shown[5], shown[8]] == [str(1 + others[0]), str(1 + others[1])]
    assert f"{result.effective_dimension:.3g} of at most 4, at the ridge 10." in " ".join(lines)


@pytest.mark.parametrize("count", [1, 2, 20, 21, 100])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_it_fits_a_hundred_columns_whatever_the_number_of_domains(count, name):
    names = [f"a-domain-with-a-long-name-{number}" for number in range(count)]
    text = explanation(names, windows_of(count), "pretrain", RECIPES[name], None)
    assert max(map(len, text.splitlines())) <= 100
    assert ("The nearest pairs:" in text.replace("\n", " ")) == (count > 20)


def test_identical_domains_are_explained_too():
    windows = windows_of(4)
    same = dataclasses.replace(windows, means=np.ones((4, 16)), means_of_half=np.ones((4, 16)))
    lines = block(explanation(NAMES[:4], same, "pretrain", RECIPES["reference"], None), "KNOBS")
    assert row(lines, "code")[:3] == ["0.2500"] * 3
