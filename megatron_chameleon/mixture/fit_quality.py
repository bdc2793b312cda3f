"""Quality of a fit on held-out mixtures, and distance of a mixture from the trained ones."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from scipy.spatial import cKDTree
from scipy.stats import ConstantInputWarning, spearmanr

from megatron_chameleon.mixture.checks import Array

Predict: TypeAlias = Callable[[Array], Array]
"""Mixtures [n, k] -> predicted losses [n, m]."""
Fit: TypeAlias = Callable[[Array, Array], Predict]
"""Mixtures [n, k] and losses [n, m] -> predictor."""

# The usual distance is this quantile of the trained mixtures' distances to their nearest
# neighbours.
USUAL_SHARE = 0.95


@dataclasses.dataclass(frozen=True, eq=False)
class FitQuality:
    """Predictions for held-out mixtures, compared with their losses."""

    spearman: Array
    """[m] rank correlation per loss; NaN where one side is constant."""
    mae: Array
    """[m] mean absolute error, in the unit of the losses."""
    spread: Array
    """[m] mean absolute deviation of the losses from their median: the error of the best
    constant."""


def quality_of(predicted: Array, losses: Array) -> FitQuality:
    """The quality of ``predicted`` [n, m] against ``losses`` [n, m]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        ranks = [spearmanr(*pair).statistic for pair in zip(predicted.T, losses.T, strict=True)]
    return FitQuality(
        spearman=np.array(ranks),
        mae=np.abs(predicted - losses).mean(axis=0),
        spread=np.abs(losses - np.median(losses, axis=0)).mean(axis=0),
    )


def folds_of(count: int, folds: int, seed: int) -> list[Array]:
    """Random partition of 0 to ``count`` - 1 into ``folds`` arrays of about equal size.

    Raises:
        ValueError: for fewer than 2 folds, or more than there are numbers.
    """
    if not 2 <= folds <= count:
        raise ValueError(f"{folds} folds of {count} runs: must be between 2 and the number of runs")
    return np.array_split(np.random.default_rng(seed).permutation(count), folds)


def held_out_predictions(fit: Fit, mixtures: Array, losses: Array, folds: list[Array]) -> Array:
    """Out-of-fold (cross-validated) predictions [n, m].

    Args:
        fit: the method to cross-validate.
        mixtures: [n, k] weights of the runs.
        losses: [n, m] losses of the runs.
        folds: indices of the runs in each fold; each run is in exactly one.
    """
    predicted = np.empty_like(losses)
    for held_out in folds:
        rest = np.setdiff1d(np.arange(len(losses)), held_out)
        predicted[held_out] = fit(mixtures[rest], losses[rest])(mixtures[held_out])
    return predicted


def fit_linear(mixtures: Array, losses: Array) -> Predict:
    """Least squares of the losses on the weights and a constant: the baseline of a fit.

    The weights sum to 1, so the constant depends linearly on them; of all solutions, the one of
    smallest norm is used.
    """

    def design(rows: Array) -> Array:
        return np.column_stack([rows, np.ones(len(rows))])

    solution = np.linalg.lstsq(design(mixtures), losses, rcond=None)[0]
    return lambda others: design(others) @ solution


@dataclasses.dataclass(frozen=True)
class Reach:
    """Distance of a mixture from the trained ones."""

    nearest: int
    """Position of the nearest trained mixture."""
    distance: float
    """Total variation distance to it: the share of the tokens that differ."""
    usual: float
    """95% of the trained mixtures have another trained mixture within this distance."""
    outside: tuple[int, ...]
    """Domains whose weight is outside of the trained range."""

    @property
    def extrapolates(self) -> bool:
        """Whether no trained mixture is near."""
        return bool(self.outside) or self.distance > self.usual


def reach_of(weights: Array, trained: Array) -> Reach:
    """Distance of ``weights`` [k] from the mixtures ``trained`` [n, k]."""
    distances = np.abs(trained - weights).sum(axis=1) / 2
    tolerance = 1e-9
    above = weights > trained.max(axis=0) + tolerance
    below = weights < trained.min(axis=0) - tolerance
    # Between each trained mixture and the nearest other one.
    neighbours = cKDTree(trained).query(trained, k=[2], p=1)[0] / 2
    return Reach(
        nearest=int(distances.argmin()),
        distance=float(distances.min()),
        usual=float(np.quantile(neighbours, USUAL_SHARE)) if len(trained) > 1 else 0.0,
        outside=tuple(np.flatnonzero(above | below).tolist()),
    )
