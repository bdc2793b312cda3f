"""Shrink Chameleon's weights if the proxy hardly separates the domains.

In the embeddings of an undertrained proxy, the domains differ along one or two directions only. A
domain whose coordinates there are near the mean by chance has a score near 0 and nearly all of the
pretraining weight, and another seed of the proxy chooses another domain. A domain far from the mean
gets most of the fine-tuning weight. Resampling the windows does not show the variation between
seeds, and neither do other layers of the same proxy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import linalg

from megatron_chameleon.mixture.affinity import center_embeddings
from megatron_chameleon.mixture.checks import Array, as_matrix

# Directions that suffice for any number of domains: those of eight domains, with which the rule was
# calibrated (docs/method.md).
MOST_DIRECTIONS = 7

# A direction counts half if its eigenvalue is this share of the sum of all eigenvalues.
RELATIVE_RIDGE = 0.01


def effective_directions(embeddings: npt.ArrayLike) -> float:
    """Count the directions in which the domains differ: r = (sum l)^2 / sum l^2.

    l_j = sigma_j / (sigma_j + 0.01 sum sigma), with sigma_j the eigenvalues of K of the centred
    embeddings: the leverage of direction j at a ridge of 0.01 times the mean eigenvalue. The ratio
    is known as the participation ratio. It does not depend on the scale of the embeddings.

    Args:
        embeddings: [k, h], any real dtype; float64 inside.

    Returns:
        At least 1 and at most min(k - 1, h); 0 if all embeddings are equal.

    Raises:
        ValueError: if ``embeddings`` is not a finite matrix.
    """
    singular = linalg.svdvals(center_embeddings(as_matrix(embeddings)))
    if not singular.max() > 0:
        return 0.0
    eigenvalues = np.square(singular / singular.max())
    leverages = eigenvalues / (eigenvalues + RELATIVE_RIDGE * eigenvalues.sum())
    return float(leverages.sum()) ** 2 / float(np.square(leverages).sum())


def shrinkage_factor(directions: float, num_domains: int) -> float:
    """Return the factor of the log weights: 1 leaves the weights unchanged, and 0 gives Uniform.

    Let q = (r - 1) / (m - 1) with m = min(k - 1, 7): q is 0 if the domains differ along one
    direction, and 1 if they differ equally along m. The factor is 0 up to q = 0.7, 1 from q = 0.8
    on, and linear in between. For eight or more domains, these are 5.2 and 5.8 directions.

    Args:
        directions: r, from :func:`effective_directions`.
        num_domains: k. For two domains or one, the weights are equal anyway, and the factor is 1.
    """
    most = min(num_domains - 1, MOST_DIRECTIONS)
    if most < 2:
        return 1.0
    return float(np.clip(10 * (directions - 1) / (most - 1) - 7, 0.0, 1.0))


def shrunk_weights(weights: npt.ArrayLike, factor: float, prior: Array | None = None) -> Array:
    """Shrink log weights towards Uniform, or towards a prior: w^f p^(1 - f), normalized.

    Args:
        weights: w, [k], not negative, summing to 1.
        factor: f, from 0 (the prior) to 1 (the weights, bit for bit).
        prior: eta, [k], > 0, with mean 1, so that p = eta / k; None for Uniform.

    Returns:
        [k] float64, summing to 1.
    """
    vector = np.asarray(weights, dtype=np.float64)
    if factor == 1.0:
        return vector
    center = np.ones_like(vector) if prior is None else prior
    # A weight that has underflowed to 0 has a finite logarithm here.
    logs = factor * np.log(np.maximum(vector, np.finfo(np.float64).tiny))
    logs += (1.0 - factor) * np.log(center)
    unnormalized = np.exp(logs - logs.max())
    result: Array = unnormalized / unnormalized.sum()
    return result
