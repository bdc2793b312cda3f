"""Invalid arguments raise ValueError and name the argument."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_chameleon.mixture import (
    affinity_matrix,
    bootstrap_weights,
    chameleon_weights,
    domain_weights,
    leverage_scores,
)
from megatron_chameleon.mixture.constraints import capped_weights, placed_weights
from megatron_chameleon.mixture.doge import DogeRecipe, DogeState, Roles
from megatron_chameleon.mixture.doremi import DoremiRecipe, DoremiState
from megatron_chameleon.mixture.mixing_laws import fit_power_laws
from megatron_chameleon.mixture.sampling import SamplingRule, sample_mixtures
from megatron_chameleon.mixture.weights import natural_weights

NAN, ONE, TWO = np.nan, np.ones(1), np.ones(2)
ONE_WINDOW, WIDER = np.ones((2, 3)), np.ones((2, 4))
# Every pair of domains is possible, all three together are not.
INDEFINITE = [[1.0, -0.9, -0.9], [-0.9, 1.0, -0.9], [-0.9, -0.9, 1.0]]
BOTH = Roles((0, 1), (0, 1))
DOGE, DOREMI = DogeState.first(2, BOTH), DoremiState.first(2, 100, DoremiRecipe())


@pytest.mark.parametrize(
    ("message", "function", "arguments"),
    [
        ("shape", affinity_matrix, (np.zeros((0, 4)), True)),
        ("row 1", affinity_matrix, ([[1.0, 2.0], [3.0, NAN]], True)),
        ("inner products", affinity_matrix, ([[1e200, 0.0], [1.0, 0.0]], True)),
        (r"entry \[0, 1\]", leverage_scores, ([[1.0, 0.5], [0.2, 1.0]], 1.0)),
        (r"entry \[0, 1\]", leverage_scores, ([[1.0, 2.0], [2.0, 1.0]], 1.0)),
        ("eigenvalue", leverage_scores, (INDEFINITE, 1e-2)),
        ("ridge", leverage_scores, (np.eye(2), 0.0)),
        ("vector", domain_weights, ([], "pretrain", 5.0, True)),
        ("entry 1", domain_weights, ([0.5, -0.1], "pretrain", 5.0, True)),
        ("no old domain", placed_weights, ([0.5, 0.25, 0.25], [0.0, 0.0, 5.0], [1, 1, 0])),
        (r"\[1\] has 4 features", bootstrap_weights, ([ONE_WINDOW, WIDER], np.ones)),
        (r"\[1\] row 1", bootstrap_weights, ([np.ones((2, 1)), [[1.0], [NAN]]], np.ones)),
        (r"sum to 0\.9, less than 1", capped_weights, ([0.5, 0.5], [0.4, 0.5])),
        ("no tokens", natural_weights, ([0, 0],)),
        ("finite", DOGE.after, (np.full((2, 2), NAN), [0, 1], 0.1, DogeRecipe(), BOTH)),
        ("nan", DOREMI.after, (np.array([0.0, NAN]), TWO, DoremiRecipe())),
        ("2 points", fit_power_laws, (TWO, np.ones((1, 2)))),
        ("fewer than 40", sample_mixtures, (np.ones(3), 40, 0, SamplingRule(smallest_weight=0.25))),
        ("1 times its prior", sample_mixtures, (TWO, 9, 0, SamplingRule(max_upweighting=1.0))),
    ],
)
def test_invalid_arguments_are_rejected(message, function, arguments):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (DogeRecipe(), {"mu": 1e-310}),
        (DogeRecipe(), {"dw_min": 5.0}),
        (DoremiRecipe(), {"eta": NAN}),
        (DoremiRecipe(), {"ceiling": 0.0}),
        (SamplingRule(), {"min_strength": 9.0}),
        (SamplingRule(), {"max_upweighting": 0.5}),
    ],
)
def test_settings_out_of_range_are_rejected(settings, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(settings, **changes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("ridge", {"ridge": 0.0}),
        ("normalize", {"temperature_relative": True}),
        ("score_floor", {"score_floor": NAN}),
        ("score_ceiling", {"score_ceiling": 1.0}),
        ("prior has shape", {"prior": [1.0, 2.0]}),
    ],
)
def test_invalid_recipes_and_priors_are_rejected(message, changes):
    with pytest.raises(ValueError, match=message):
        chameleon_weights(np.eye(3), "pretrain", "paper", **changes)
