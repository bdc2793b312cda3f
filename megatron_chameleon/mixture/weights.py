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
    degenerate = degenerate_positions(vector, mode, score_floor, score_ceiling, prior)
    ratios, mean = _per_prior(vector, mode, prior), float(vector.mean())
    if degenerate:
        message = _describe(ratios, mean, degenerate, score_floor, score_ceiling)
        warnings.warn(message, DegenerateScoreWarning, stacklevel=2)
    limited = _limited(ratios, mean, mode, score_floor, score_ceiling)
    if normalize:
        # Divided by the sum before the limits: afterwards one huge outlier, held at the ceiling,
        # would lift all others and so undo the ceiling. A mean of 0, that of denormal scores too,
        # has made all scores equal.
        limited = limited / float((vector if mean > 0.0 else limited).sum())
    return softmax(1.0 / limited if mode == "pretrain" else limited, tau)


def softmax(logits: Array, temperature: float) -> Array:
    """exp(z / tau) over its sum for finite logits [k], shifted by the largest before dividing."""
    with np.errstate(over="ignore", under="ignore"):
        # A tiny tau turns a difference into -inf, whose exponential is the right 0.
        unnormalized = np.exp((logits - logits.max()) / temperature)
    weights: Array = unnormalized / unnormalized.sum()
    return weights


def check_score_limits(score_floor: float, score_ceiling: float) -> None:
    """Raise unless 0 < floor < 1 < ceiling; both are relative to the mean score."""
    if not 0.0 < score_floor < 1.0:
        raise ValueError(f"score_floor is {score_floor!r}: it must lie between 0 and 1")
    if not score_ceiling > 1.0:
        raise ValueError(f"score_ceiling is {score_ceiling!r}: it must be above 1 (inf for none)")


def degenerate_positions(
    scores: Array,
    mode: Mode,
    score_floor: float,
    score_ceiling: float,
    prior: Array | None = None,
) -> tuple[int, ...]:
    """Positions of the scores [k] that ``domain_weights`` clips and warns about.

    A single domain has weight 1 for any score, so it is never degenerate.
    """
    if scores.size == 1:
        return ()
    mean = float(scores.mean())
    ratios = _per_prior(scores, mode, prior)
    outside = ratios > score_ceiling * mean if mean > 0.0 else np.ones(scores.size, dtype=bool)
    if mode == "pretrain":
        outside |= ratios < _lowest(mean, score_floor)
    return tuple(int(i) for i in np.flatnonzero(outside))


def _per_prior(scores: Array, mode: Mode, prior: Array | None) -> Array:
    """S / eta, which is inverted in pretraining; S in fine-tuning or without a prior."""
    return scores if prior is None or mode == "finetune" else scores / prior


def _lowest(mean: float, score_floor: float) -> float:
    # Never below the smallest normal float, whose inverse is still finite.
    return max(score_floor * mean, float(np.finfo(np.float64).tiny))


def _limited(
    ratios: Array, mean: float, mode: Mode, score_floor: float, score_ceiling: float
) -> Array:
    if mean == 0.0:
        return np.ones_like(ratios)
    lowest = _lowest(mean, score_floor) if mode == "pretrain" else 0.0
    return np.clip(ratios, lowest, max(score_ceiling * mean, lowest))


def _describe(
    scores: Array,
    mean: float,
    positions: tuple[int, ...],
    score_floor: float,
    score_ceiling: float,
) -> str:
    low = [i for i in positions if scores[i] <= mean]
    high = [i for i in positions if scores[i] > mean]
    parts = []
    if low:
        parts.append(
            f"below {score_floor:g} of the mean score at position {_listed(low)} "
            "(a domain at the mean of all, or a near-duplicate of it)"
        )
    if high:
        parts.append(
            f"above {score_ceiling:g} times the mean score at position {_listed(high)} "
            "(a domain unlike any other)"
        )
    return (
        f"leverage scores are {' and '.join(parts)}: they are clipped and their weights are "
        "bounds; inspect these domains, or change the temperature or the score limits"
    )


def _listed(positions: list[int]) -> str:
    more = len(positions) - MAX_POSITIONS_SHOWN
    shown = ", ".join(str(i) for i in positions[:MAX_POSITIONS_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


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
