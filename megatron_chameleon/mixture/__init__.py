"""The maths of data mixing: vectors or losses in, weights out. numpy and scipy only."""

from megatron_chameleon.mixture.affinity import affinity_matrix, nearest_rows
from megatron_chameleon.mixture.bootstrap import (
    BootstrapResult,
    bootstrap_weights,
    group_size,
    grouped_windows,
    is_one_hot,
    is_within_noise_of_uniform,
    outweighing_probability,
    windows_needed,
)
from megatron_chameleon.mixture.caps import CappedWeights, capped_weights
from megatron_chameleon.mixture.chameleon import (
    DEFAULT_RECIPE,
    RECIPES,
    Recipe,
    WeightResult,
    chameleon_weight_fn,
    chameleon_weights,
    resolve_recipe,
)
from megatron_chameleon.mixture.checks import Mode
from megatron_chameleon.mixture.leverage import leverage_scores
from megatron_chameleon.mixture.target import similarity_shares, target_prior
from megatron_chameleon.mixture.weights import (
    DegenerateScoreWarning,
    domain_weights,
    placed_weights,
)

__all__ = [
    "DEFAULT_RECIPE",
    "RECIPES",
    "BootstrapResult",
    "CappedWeights",
    "DegenerateScoreWarning",
    "Mode",
    "Recipe",
    "WeightResult",
    "affinity_matrix",
    "bootstrap_weights",
    "capped_weights",
    "chameleon_weight_fn",
    "chameleon_weights",
    "domain_weights",
    "group_size",
    "grouped_windows",
    "is_one_hot",
    "is_within_noise_of_uniform",
    "leverage_scores",
    "nearest_rows",
    "outweighing_probability",
    "placed_weights",
    "resolve_recipe",
    "similarity_shares",
    "target_prior",
    "windows_needed",
]
