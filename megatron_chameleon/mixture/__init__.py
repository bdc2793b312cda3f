"""The maths of data mixing: domain weights from embeddings or losses, with numpy and scipy."""

from megatron_chameleon.mixture.affinity import affinity_matrix
from megatron_chameleon.mixture.bootstrap import bootstrap_weights
from megatron_chameleon.mixture.chameleon import (
    RECIPES,
    Recipe,
    WeightResult,
    chameleon_weights,
)
from megatron_chameleon.mixture.leverage import leverage_scores
from megatron_chameleon.mixture.surrogate import Surrogate, fit_surrogate
from megatron_chameleon.mixture.weights import DegenerateScoreWarning, domain_weights

__all__ = [
    "RECIPES",
    "DegenerateScoreWarning",
    "Recipe",
    "Surrogate",
    "WeightResult",
    "affinity_matrix",
    "bootstrap_weights",
    "chameleon_weights",
    "domain_weights",
    "fit_surrogate",
    "leverage_scores",
]
