"""Domain weights: from leverage scores, from domain sizes, and under constraints."""

from __future__ import annotations

import math
import warnings

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array, Mode, as_scores, check_mode, check_positive

# Default lower limit, as a fraction of the mean score. Smaller scores are rounding errors.
SCORE_FLOOR = 1e-10
# Caps may sum to less than 1 by this much, because of rounding.
ROUNDING = 1e-12


class DegenerateScoreWarning(UserWarning):
    """A score was clipped, so the domain's weight depends on the clipping limit."""


def domain_weights(
    scores: npt.ArrayLike,
    mode: Mode,
    temperature: float,
    normalize: bool,
    *,
    prior: Array | None = None,
    score_floor: float = SCORE_FLOOR,
    score_ceiling: float = math.inf,
) -> Array:
    """Compute weights as a softmax of inverse scores (pretraining) or of scores (fine-tuning).

    alpha_i = exp(z_i / tau) / sum_j exp(z_j / tau), with z = 1 / S for pretraining and z = S for
    fine-tuning (Chameleon, Xie, Tonin and Cevher, ICML 2025, section 3.2; tau is in the
    appendix on the experimental setup and is missing from Algorithm 1). The largest z is
    subtracted first, so that nothing overflows.

    If embeddings are centred, a domain near their mean has S near 0 and an unbounded 1 / S. Its
    score is clipped to ``score_floor`` times the mean score and a ``DegenerateScoreWarning`` names
    its position. With the default floor the domain then gets nearly all weight in pretraining,
    which is the limit of the formula. The floor matters only for 1 / S, so fine-tuning warns only
    if every score is 0 (the weights are then equal).

    With a prior eta, z = eta / S for pretraining (see ``megatron_chameleon.mixture.target``), and
    the limits apply to S / eta, relative to the mean of S. Fine-tuning uses z = S in both cases.

    Args:
        scores: S, [k], not negative.
        mode: "pretrain" or "finetune".
        temperature: tau > 0, in the units of z.
        normalize: first divide the scores by their sum, as the authors' code does.
        prior: eta, [k], > 0, with mean 1; the scores must have been computed with the same prior.
        score_floor: lower clipping limit, as a share of the mean score; in (0, 1).
        score_ceiling: upper clipping limit, as a multiple of the mean score; > 1.

    Returns:
        [k] float64 weights, not negative, summing to 1.

    Raises:
        ValueError: if ``scores`` is not a vector, is empty, is not finite or is negative, ``mode``
            is unknown, ``temperature`` is not above 0, or a limit is out of range.
    """
    vector = as_scores(scores)
    check_mode(mode)
    tau = check_positive(temperature, "temperature")
    check_score_limits(score_floor, score_ceiling)
    limited, degenerate = clip_scores(vector, mode, score_floor, score_ceiling, prior)
    if degenerate:
        warnings.warn(
            f"{len(degenerate)} leverage scores (position {', '.join(map(str, degenerate[:8]))}"
            f"{', ...' if len(degenerate) > 8 else ''}) were clipped to {score_floor:g} or "
            f"{score_ceiling:g} times the mean score, so the weights of these domains depend on "
            "the limits; inspect these domains, or change the temperature or the score limits",
            DegenerateScoreWarning,
            stacklevel=2,
        )
    if normalize:
        # Divide by the sum of the unclipped scores: clipping an outlier to the ceiling lowers the
        # sum, which would raise all other scores. If all scores are 0, clip_scores() has set them
        # to 1, so their sum is used.
        limited = limited / float((vector if vector.mean() > 0.0 else limited).sum())
    logits = 1.0 / limited if mode == "pretrain" else limited
    with np.errstate(over="ignore", under="ignore"):
        # With a tiny tau a difference overflows to -inf, whose exponential is correctly 0.
        unnormalized = np.exp((logits - logits.max()) / tau)
    return unnormalized / unnormalized.sum()


def check_score_limits(score_floor: float, score_ceiling: float) -> None:
    """Raise unless 0 < floor < 1 < ceiling; both are relative to the mean score."""
    if not 0.0 < score_floor < 1.0:
        raise ValueError(f"score_floor is {score_floor!r}: it must lie between 0 and 1")
    if not score_ceiling > 1.0:
        raise ValueError(
            f"score_ceiling is {score_ceiling!r}: it must be above 1 (inf for no ceiling)"
        )


def clip_scores(
    scores: Array,
    mode: Mode,
    score_floor: float,
    score_ceiling: float,
    prior: Array | None = None,
) -> tuple[Array, tuple[int, ...]]:
    """Clip the scores [k] for ``domain_weights``.

    Returns:
        The clipped scores (S / eta with a prior in pretraining, S otherwise), and the positions
        that were clipped. A single domain has weight 1 for any score and counts as not clipped.
    """
    mean = float(scores.mean())
    if mean == 0.0:
        limited, clipped = np.ones_like(scores), np.ones(scores.size, dtype=bool)
    else:
        ratios = scores if prior is None or mode == "finetune" else scores / prior
        # Raise scores to at least the smallest normal float, so that their inverses are finite.
        lowest = max(score_floor * mean, float(np.finfo(np.float64).tiny))
        lowest = lowest if mode == "pretrain" else 0.0
        limited = np.clip(ratios, lowest, max(score_ceiling * mean, lowest))
        clipped = limited != ratios
    return limited, tuple(np.flatnonzero(clipped).tolist()) if scores.size > 1 else ()


def natural_weights(tokens: npt.ArrayLike, temperature: float = 1.0) -> Array:
    """Compute natural weights: w_i proportional to n_i^(1/T), with n_i the tokens of domain i.

    T = 1 samples every token with the same probability; T > 1 moves the weights towards uniform,
    and T < 1 towards the largest domain. This is the temperature of multilingual
    pretraining; some papers state the exponent alpha = 1 / T instead (XLM-R 0.3, RegMix's prior
    0.5).

    Args:
        tokens: n, [k], not negative, not all zero. A domain without tokens gets the weight 0.
        temperature: T, above 0.

    Returns:
        [k] float64, summing to 1.

    Raises:
        ValueError: if no domain has tokens.
    """
    counts = np.asarray(tokens, dtype=np.float64)
    if not (counts > 0).any():
        raise ValueError("no tokens: at least one domain needs text")
    # Tokens are divided by the largest count, so that no T overflows; the logarithm of 0 is -inf.
    with np.errstate(divide="ignore", over="ignore"):
        powers = np.exp(np.log(counts / counts.max()) / temperature)
    return powers / powers.sum()


def capped_weights(weights: npt.ArrayLike, caps: npt.ArrayLike) -> Array:
    """Return the mixture w with w_i <= c_i that is nearest to p in Kullback-Leibler divergence.

    At the minimum of sum_i w_i log(w_i / p_i), domains below their cap keep their ratios:
    w_i = min(c_i, s p_i), with the s for which the sum is 1 (by the Karush-Kuhn-Tucker conditions;
    the reverse divergence has the same minimum). Caps bind in the order of c_i / p_i, so s is found
    by sorting.

    Args:
        weights: p, [k], >= 0, summing to 1. A weight of 0 stays 0.
        caps: c, [k], not negative; infinity for no cap.

    Returns:
        [k] float64, summing to 1; a weight at its cap equals it exactly.

    Raises:
        ValueError: if the caps of the domains with a positive weight sum to less than 1.
    """
    target, upper = (np.asarray(values, dtype=np.float64) for values in (weights, caps))
    target = target / target.sum()
    if (target <= upper).all():
        return target
    present = np.flatnonzero(target)
    if upper[present].sum() < 1.0 - ROUNDING:
        raise ValueError(
            f"the caps of the domains with a weight above 0 sum to {upper[present].sum():.6g}, "
            "less than 1: raise the caps"
        )
    order = present[np.argsort(upper[present] / target[present], kind="stable")]
    # If the first n domains are at their caps, s is (1 - the sum of these caps) / (the sum of the
    # other weights).
    left = 1.0 - np.concatenate([[0.0], np.cumsum(upper[order])[:-1]])
    others = np.cumsum(target[order][::-1])[::-1]
    fits = left / others * target[order] <= upper[order]
    found: Array = np.minimum(upper, 1.0) * (target > 0)
    if fits.any():
        first = int(fits.argmax())
        free = order[first:]
        found[free] = target[free] * (left[first] / others[first])
    return found


def placed_weights(weights: npt.ArrayLike, before: npt.ArrayLike, is_old: npt.ArrayLike) -> Array:
    """Add new domains to a mixture whose old domains keep their ratios.

    Args:
        weights: [k] of all domains, old and new, >= 0, summing to 1.
        before: [k] earlier weights of the old domains; entries of new domains are ignored.
        is_old: [k] bool.

    Returns:
        [k] float64, summing to 1.

    Raises:
        ValueError: if no old domain has a weight.
    """
    new = np.asarray(weights, dtype=np.float64)
    old = np.asarray(is_old, dtype=bool)
    earlier = np.where(old, np.asarray(before, dtype=np.float64), 0.0)
    if not earlier.sum() > 0:
        raise ValueError("no old domain has a weight: there are no ratios to keep")
    rest = new[old].sum() / new.sum()
    return np.where(old, rest * earlier / earlier.sum(), new / new.sum())
