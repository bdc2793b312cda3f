"""Invalid arguments raise ValueError and name the argument."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from megatron_chameleon.mixture import (
    affinity_matrix,
    bootstrap_weights,
    chameleon_weights,
    domain_weights,
    leverage_scores,
)
from megatron_chameleon.mixture.doge import DogeRule, DogeState, Roles
from megatron_chameleon.mixture.doremi import DoremiRule, DoremiState
from megatron_chameleon.mixture.mixing_laws import fit_power_laws
from megatron_chameleon.mixture.regmix import SamplingRule, sample_mixtures
from megatron_chameleon.mixture.weights import capped_weights, natural_weights, placed_weights

NAN, TWO, ONE_WINDOW, WIDER = np.nan, np.ones(2), np.ones((2, 3)), np.ones((2, 4))
# Each 2 x 2 block is a valid Gram matrix, but the whole matrix has a negative eigenvalue.
INDEFINITE = [[1.0, -0.9, -0.9], [-0.9, 1.0, -0.9], [-0.9, -0.9, 1.0]]
BOTH = Roles((0, 1), (0, 1))
DOGE, DOREMI = DogeState.first(2, BOTH), DoremiState.first(2, 100, DoremiRule())
by_recipe = partial(chameleon_weights, np.eye(3), "pretrain", "paper")


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("shape", partial(affinity_matrix, np.zeros((0, 4)), True)),
        ("row 1", partial(affinity_matrix, [[1.0, 2.0], [3.0, NAN]], True)),
        ("inner products", partial(affinity_matrix, [[1e200, 0.0], [1.0, 0.0]], True)),
        (r"entry \[0, 1\]", partial(leverage_scores, [[1.0, 0.5], [0.2, 1.0]], 1.0)),
        (r"entry \[0, 1\]", partial(leverage_scores, [[1.0, 2.0], [2.0, 1.0]], 1.0)),
        ("eigenvalue", partial(leverage_scores, INDEFINITE, 1e-2)),
        ("ridge", partial(leverage_scores, np.eye(2), 0.0)),
        ("entry 1", partial(domain_weights, [0.5, -0.1], "pretrain", 5.0, True)),
        ("normalize", partial(by_recipe, temperature_relative=True)),
        ("score_floor", partial(by_recipe, score_floor=NAN)),
        ("prior has shape", partial(by_recipe, prior=[1.0, 2.0])),
        (r"\[1\] has 4 features", partial(bootstrap_weights, [ONE_WINDOW, WIDER], np.ones)),
        ("no old domain", partial(placed_weights, [0.5, 0.5], [0.0, 5.0], [1, 0])),
        (r"sum to 0\.9, less than 1", partial(capped_weights, [0.5, 0.5], [0.4, 0.5])),
        ("no tokens", partial(natural_weights, [0, 0])),
        ("finite", partial(DOGE.after, np.full((2, 2), NAN), [0, 1], 0.1, DogeRule(), BOTH)),
        ("nan", partial(DOREMI.after, np.array([0.0, NAN]), TWO, DoremiRule())),
        ("2 points", partial(fit_power_laws, TWO, np.ones((1, 2)))),
        (
            "fewer than 40",
            partial(sample_mixtures, np.ones(3), 40, 0, SamplingRule(smallest_weight=0.25)),
        ),
        ("mu", partial(DogeRule, mu=1e-310)),
        ("dw_min", partial(DogeRule, dw_min=5.0)),
        ("ceiling", partial(DoremiRule, ceiling=0.0)),
        ("min_strength", partial(SamplingRule, min_strength=9.0)),
    ],
)
def test_invalid_arguments_are_rejected(message, call):
    with pytest.raises(ValueError, match=message):
        call()
