"""How well a fit predicts runs that were held out of it, and whether it prefers its optimum."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy.stats import t as student

from megatron_chameleon.console import align_columns
from megatron_chameleon.interchange.mixture_runs import MixtureRuns
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import quality_of
from megatron_chameleon.mixture.gain import CONFIDENCE, PredictedGain

NO_BETTER = "the fit predicts the target no better than a constant"


def cross_validation(
    table: MixtureRuns, shares: Array, held_out: Array, linear: Array
) -> pd.DataFrame:
    """Compute how well a fit and a linear baseline predict held-out runs.

    The target is a weighted mean of losses. It can be harder to predict than each loss: a mixture
    that lowers the loss of one domain raises that of another, so the mean varies little.

    Args:
        table: n runs with m losses.
        shares: [m] share of each loss in the target.
        held_out: [n, m] predictions of the fit for runs that were held out of it.
        linear: [n, m] predictions of the linear baseline.

    Returns:
        A row per loss, and the target in the last row, with the columns spearman, mae,
        mae_of_a_constant (of the best constant), linear_spearman and linear_mae.
    """
    fit, baseline, losses = (
        np.column_stack([values, values @ shares]) for values in (held_out, linear, table.losses)
    )
    found, simple = quality_of(fit, losses), quality_of(baseline, losses)
    columns = {
        "spearman": found.spearman,
        "mae": found.mae,
        "mae_of_a_constant": found.spread,
        "linear_spearman": simple.spearman,
        "linear_mae": simple.mae,
    }
    return pd.DataFrame(columns, [*table.metrics, "target"])


def cross_validated_gain(
    trained: Array, errors: Array, compared: Array, gain: float
) -> PredictedGain:
    """Return a predicted ``gain`` with an interval.

    A gain is a difference of two predictions. Their errors are assumed to be independent, and like
    the errors for the runs that are nearest to each mixture, half of all. The interval is Student's
    t, with the mean squares of these errors. The noise of the losses widens it. It covers neither
    that the search selects a mixture whose prediction is too low, nor extrapolation.

    Args:
        trained: [n, k] weights of the runs.
        errors: e, [n], target loss predicted by a fit to other runs minus the measured one.
        compared: [2, k] weights of the optimum and of the baseline.
        gain: predicted target loss of the baseline minus that of the optimum.
    """
    distances = np.abs(trained - compared[:, None]).sum(axis=2)
    count = max(len(trained) // 2, 2)
    near = errors[np.argsort(distances, axis=1, kind="stable")[:, :count]]
    quantile = float(student.ppf(0.5 + CONFIDENCE / 2, count - 1))
    margin = quantile * math.sqrt(float((near**2).mean(axis=1).sum()))
    return PredictedGain(gain, gain - margin, gain + margin, CONFIDENCE)


def is_no_better(quality: pd.DataFrame) -> bool:
    """Return whether a constant predicts the target as well as the fit."""
    target = quality.iloc[-1]
    return bool(target.mae >= target.mae_of_a_constant)


def fit_problems(quality: pd.DataFrame) -> list[str]:
    """Return a warning if a constant or a linear fit predicts the target better than the fit."""
    target = quality.iloc[-1]
    if is_no_better(quality):
        return [f"{NO_BETTER}: the mixture is arbitrary"]
    if target.mae > target.linear_mae:
        return ["a linear fit predicts the target better: the mixture is uncertain"]
    return []


def quality_table(quality: pd.DataFrame, shares: Array) -> list[str]:
    """Format the result of :func:`cross_validation` as a table; * marks losses in the target."""
    rows = [["loss", "Spearman", "error", "linear: Spearman", "error", "error of a constant"]]
    for row, share in zip(quality.itertuples(), [*shares, 0.0], strict=True):
        ranks = [
            "constant" if math.isnan(rank) else f"{rank:.3f}"
            for rank in (row.spearman, row.linear_spearman)
        ]
        errors = [f"{each:.4f}" for each in (row.mae, row.linear_mae, row.mae_of_a_constant)]
        name = f"{row.Index}*" if share else row.Index
        rows.append([name, ranks[0], errors[0], ranks[1], *errors[1:]])
    return align_columns(rows)
