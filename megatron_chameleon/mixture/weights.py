"""Leverage scores -> domain weights."""

from __future__ import annotations

import math
import warnings

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array, Mode, as_scores, check_mode, check_positive

# Scores below this share of the mean score are rounding errors.
SCORE_FLOOR = 1e-10

MAX_POSITIONS_SHOWN = 8


class DegenerateScoreWarning(UserWarning):
    """A score was clipped to a limit; its weight is a bound, not a measurement."""


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
    """Softmax of the inverse scores (pretraining) or of the scores (fine-tuning).

    alpha_i = exp(z_i / tau) / sum_j exp(z_j / tau), with z = 1 / S for pretraining and z = S for
    fine-tuning (Chameleon, Xie, Tonin and Cevher, ICML 2025, section 3.2; tau is in the
    appendix on the experimental setup and is missing from Algorithm 1). The largest z is
    subtracted first, so that nothing overflows.

    A domain at the mean of all domains has S near 0 and an unbounded 1 / S. Its score is clipped to
    ``score_floor`` times the mean score and a ``DegenerateScoreWarning`` names its position. With
    the default floor it then gets nearly all weight in pretraining, the limit of the formula.
    The floor matters to 1 / S only, so fine-tuning warns only if every score is 0 (the weights
    are then equal).

    With a prior eta, z = eta / S for pretraining (see ``megatron_chameleon.mixture.target``), and
    the limits hold S / eta against the mean of S; z = S for fine-tuning, as without.

    Args:
        scores: S, [k], not negative.
        mode: "pretrain" or "finetune".
        temperature: tau > 0, in the units of z.
        normalize: divide the scores by their sum before anything else, as the authors' code does.
        prior: eta, [k], above 0, of mean 1; the scores are then those of the affinity that has it.
        score_floor: lower clipping limit, as a share of the mean score; in (0, 1).
        score_ceiling: upper clipping limit, as a multiple of the mean score; > 1.

    Returns:
        [k] float64 weights, not negative, summing to 1.

    Raises:
        ValueError: scores not a vector, empty, not finite or negative; unknown mode; temperature
            not above 0; limits out of range.
    """
    vector = as_scores(scores)
    check_mode(mode)
    tau = check_positive(temperature, "temperature")
    check_score_limits(score_floor, score_ceiling)
    limited, degenerate = clip_scores(vector, mode, score_floor, score_ceiling, prior)
    if degenerate:
        more = len(degenerate) - MAX_POSITIONS_SHOWN
        shown = ", ".join(map(str, degenerate[:MAX_POSITIONS_SHOWN]))
        warnings.warn(
            f"leverage scores at position {shown}{f' and {more} more' if more > 0 else ''} are "
            f"below {score_floor:g} or above {score_ceiling:g} times the mean score (a domain at "
            "the mean of all, a near-duplicate of it, or one unlike any other): they are clipped "
            "and their weights are bounds; inspect these domains, or change the temperature or "
            "the score limits",
            DegenerateScoreWarning,
            stacklevel=2,
        )
    if normalize:
        # Divided by the sum before the limits: afterwards one huge outlier, held at the ceiling,
        # would lift all others and so undo the ceiling. A mean of 0, that of denormal scores too,
        # has made all scores equal.
        limited = limited / float((vector if vector.mean() > 0.0 else limited).sum())
    logits = 1.0 / limited if mode == "pretrain" else limited
    with np.errstate(over="ignore", under="ignore"):
        # A tiny tau turns a difference into -inf, whose exponential is the right 0.
        unnormalized = np.exp((logits - logits.max()) / tau)
    weights: Array = unnormalized / unnormalized.sum()
    return weights


def check_score_limits(score_floor: float, score_ceiling: float) -> None:
    """Raise unless 0 < floor < 1 < ceiling; both are relative to the mean score."""
    if not 0.0 < score_floor < 1.0:
        raise ValueError(f"score_floor is {score_floor!r}: it must lie between 0 and 1")
    if not score_ceiling > 1.0:
        raise ValueError(f"score_ceiling is {score_ceiling!r}: it must be above 1 (inf for none)")


def clip_scores(
    scores: Array,
    mode: Mode,
    score_floor: float,
    score_ceiling: float,
    prior: Array | None = None,
) -> tuple[Array, tuple[int, ...]]:
    """Clip the scores [k] as ``domain_weights`` does.

    Returns:
        What is inverted in pretraining, S / eta, or S in fine-tuning or without a prior, clipped;
        and the positions that were. A single domain has weight 1 for any score, so it is never
        one of them.
    """
    mean = float(scores.mean())
    if mean == 0.0:
        limited, clipped = np.ones_like(scores), np.ones(scores.size, dtype=bool)
    else:
        ratios = scores if prior is None or mode == "finetune" else scores / prior
        # Never below the smallest normal float, whose inverse is still finite.
        lowest = max(score_floor * mean, float(np.finfo(np.float64).tiny))
        lowest = lowest if mode == "pretrain" else 0.0
        limited = np.clip(ratios, lowest, max(score_ceiling * mean, lowest))
        clipped = limited != ratios
    return limited, tuple(np.flatnonzero(clipped).tolist()) if scores.size > 1 else ()


def placed_weights(weights: npt.ArrayLike, before: npt.ArrayLike, is_old: npt.ArrayLike) -> Array:
    """Add new domains to a mixture whose other domains keep their ratios.

    Args:
        weights: [k] of all domains, old and new, >= 0, summing to 1.
        before: [k] earlier weights of the old domains; entries of new ones are ignored.
        is_old: [k] bool.

    Returns:
        [k] float64, summing to 1.

    Raises:
        ValueError: not three vectors of one length, or no old domain with a weight.
    """
    all_of_them = np.asarray(weights, dtype=np.float64)
    old = np.asarray(is_old, dtype=bool)
    earlier = np.where(old, np.asarray(before, dtype=np.float64), 0.0)
    if all_of_them.ndim != 1 or not all_of_them.shape == old.shape == earlier.shape:
        raise ValueError("weights, before and is_old must be vectors of one length")
    if not earlier.sum() > 0:
        raise ValueError("no old domain has a weight: there are no ratios to keep")
    rest = all_of_them[old].sum() / all_of_them.sum()
    result: Array = np.where(old, rest * earlier / earlier.sum(), all_of_them / all_of_them.sum())
    return result
