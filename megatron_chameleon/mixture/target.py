"""Prior over the domains for a target text; it replaces the identity in the ridge.

The paper leaves targets to future work ("modifying the identity matrix within the KRLS to emphasize
relevant domains"; Chameleon, Xie, Tonin and Cevher, ICML 2025, last section). Its appendix has
the regularised Christoffel function with a prior eta_j > 0 (Pauwels, Bach and Vert,
NeurIPS 2018):

    C(x_i) = min_g  sum_j eta_j / k * g(x_j)^2 + lambda |g|^2   subject to  g(x_i) = 1
           = eta_i / k * 1 / S_i,   S = diag(K (K + k lambda diag(eta)^-1)^-1).

With D = diag(sqrt(eta)), K + k lambda D^-2 = D^-1 (D K D + k lambda I) D^-1, and so

    S = diag(D^-1 (D K D) (D K D + k lambda I)^-1 D) = diag((D K D) (D K D + k lambda I)^-1):

the scores are the ridge leverage scores of the features scaled by sqrt(eta_i), at the same ridge.

Fine-tuning uses S. If eta_i is raised and the other priors are constant or scaled down, S_i rises
and every other S_j falls. So S_i / S_j never falls, and neither does the weight of i if scores are
not normalised.

Pretraining uses z_i = k C(x_i) = eta_i / S_i; 1 / S_i alone would lower the target's weight. Let
q_i = x_i^T (k lambda I + sum_{j != i} eta_j x_j x_j^T)^-1 x_i, which does not depend on eta_i. Then
S_i = eta_i q_i / (1 + eta_i q_i) and z_i = eta_i + 1 / q_i: the prior is added to a term that
depends on the other domains only. If scores are divided by their sum, z_i = eta_i sum(S) / S_i; eta
has mean 1, so equal priors give the weights without a prior.

The effect of the prior depends on the ridge. Where K is far below k lambda, 1 / q_i is near
k lambda / K_ii and the pretraining weights ignore the prior. Where K is far above k lambda and has
full rank, S is near 1 for any eta, and the fine-tuning weights ignore the prior; a centred K has a
null vector, and S is near 1 - (1 / eta_i) / sum_j (1 / eta_j).

In pretraining, a larger prior does not always increase a domain's weight. Raising eta_i alone
raises z_i by the same amount, but raises another z_j by more if x_j is a fraction of x_i, and it
also changes sum(S). In a tenth of random problems with about as many domains as features, the
weight fell.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.affinity import center_embeddings, unit_rows
from megatron_chameleon.mixture.checks import Array, as_matrix, check_positive

DEFAULT_STRENGTH = 0.5


def target_prior(shares: npt.ArrayLike, strength: float = DEFAULT_STRENGTH) -> Array:
    """Return the prior eta_i = (1 - strength) + strength * k * t_i, whose mean is 1.

    The prior is a weighted mean of the target shares and the uniform prior. Every domain has a
    prior above 0: a prior of 0 would also remove the domain from the scores of the others.

    Args:
        shares: t, [k], share of each domain in the target: >= 0, not all 0.
        strength: in (0, 1).

    Returns:
        [k] float64; exactly 1 if all shares are equal.
    """
    target = np.asarray(shares, dtype=np.float64)
    if target.min() == target.max():
        return np.ones_like(target)
    target = target / target.max()  # the sum of large shares could overflow
    return (1.0 - strength) + strength * target.size * (target / target.sum())


def similarity_shares(embeddings: npt.ArrayLike, target: npt.ArrayLike) -> Array:
    """Compute the share of each domain in a target text, from the directions of the embeddings.

    t_i = max(0, cos(x_i - m, y - m))^2 with m the mean of the domain embeddings and y the target's.
    Subtracting m matters because hidden states have a large common mean: without it, all cosines
    would be near 1. The square is the part of the target's squared distance from m that lies in the
    domain's direction; squaring keeps many unrelated domains from outweighing one similar domain.
    The x_i - m sum to zero, so at least one cosine is above 0, unless the target is at m or
    orthogonal to all domains: the shares are then equal.

    Args:
        embeddings: x, [k, h], any real dtype; float64 inside.
        target: y, [h], embedded with the same proxy, layer and window length.

    Returns:
        [k] float64, not negative, not all zero.

    Raises:
        ValueError: if the shapes do not match, or a value is not finite.
    """
    domains = as_matrix(embeddings)
    text = as_matrix(np.asarray(target, dtype=np.float64)[None])
    direction = unit_rows(text - domains.mean(axis=0))[0]
    shares: Array = np.square(np.maximum(unit_rows(center_embeddings(domains)) @ direction, 0.0))
    return shares if shares.max() > 0 else np.ones_like(shares)


def scaled_prior(prior: npt.ArrayLike, num_domains: int) -> Array | None:
    """Return the prior [k] scaled to mean 1, or None if all entries are equal.

    Raises:
        ValueError: if the shape is not [k], or a value is not finite or not above 0.
    """
    eta = np.asarray(prior, dtype=np.float64)
    if eta.shape != (num_domains,):
        raise ValueError(f"prior has shape {eta.shape}, but there are {num_domains} domains")
    # These checks also find NaN: minimum and maximum are NaN if any entry is NaN.
    for value in (eta.min(), eta.max()):
        check_positive(float(value), "prior")
    if eta.min() == eta.max():
        return None
    relative = eta / eta.max()
    return relative / relative.mean()
