"""Aioli: estimate how each domain lowers each loss, and weigh domains by the sum.

Chen et al.: Aioli: A Unified Optimization Framework for Language Model Data Mixing, 2024
(arXiv 2411.05735). The mixing law is linear: a few steps with mixture p lower the losses L [K] of
the domains by A p. With a target, the losses are those of its m domains or texts, [m]. Where the
paper leaves a choice, these functions follow the authors' code.
"""

from __future__ import annotations

import numpy as np

from megatron_chameleon.mixture.checks import Array


def perturbed_mixture(domain: int, num_domains: int, emphasis: float) -> Array:
    """Mixture [K] with weight ``emphasis`` on ``domain``; the others share the rest equally."""
    mixture = np.full(num_domains, (1 - emphasis) / (num_domains - 1))
    mixture[domain] = emphasis
    return mixture


def mixing_matrix(drops: Array, emphasis: float) -> Array:
    """Solve A p_j = d_j for the matrix A of the mixing law, where p_j is the perturbed mixture j.

    Args:
        drops: column j is d_j, the mean decrease of each of m losses in the steps with mixture j,
            [m, K], in nats.
        emphasis: weight of domain j in mixture j, other than 1 / K.

    Returns:
        A, [m, K]: A_ij is the decrease of loss i by steps on domain j alone.
    """
    num_domains = drops.shape[1]
    rest = (1 - emphasis) / (num_domains - 1)
    # The matrix of mixtures is (emphasis - rest) I + rest 1 1^T, and the sum of its rows is 1.
    shared = rest * drops.sum(1, keepdims=True)
    matrix: Array = (drops - shared) / (emphasis - rest)
    return matrix


def normalized_gains(matrix: Array, shares: Array | None = None) -> Array:
    """Sum over losses of each domain's effect, sum_i s_i A_ij, scaled to sum 1: [K].

    If an entry is negative, the smallest entry is first subtracted from all entries, as in the
    authors' code. Losses decrease less and less during training, and scaling makes the matrices of
    different rounds comparable.

    Args:
        matrix: A, [m, K].
        shares: s, [m], share of each loss in the target; None gives all losses the same share.
    """
    shifted = matrix - min(matrix.min(), 0.0)
    if shares is not None:
        shifted = shares[:, None] * shifted
    total = shifted.sum()
    if total == 0:
        return np.full(matrix.shape[1], 1 / matrix.shape[1])
    gains: Array = shifted.sum(0) / total
    return gains


def aioli_weights(prior: Array, gains: Array, eta: float) -> Array:
    """Weights p_j proportional to p0_j exp(eta sum_i A_ij), an exponentiated gradient step.

    Args:
        prior: p0, [K]. The authors' code has the uniform mixture.
        gains: sum_i A_ij, averaged over rounds, [K].
        eta: step size.

    Returns:
        p, [K], summing to 1.
    """
    with np.errstate(over="ignore"):
        weights = prior * np.exp(eta * (gains - gains.max()))
    result: Array = weights / weights.sum()
    return result
