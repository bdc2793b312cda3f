"""How well a fit predicts runs that were held out of it, next to a linear fit and a constant."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from megatron_chameleon.console import align_columns
from megatron_chameleon.interchange.mixture_runs import MixtureRuns
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import quality_of

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


def reason_for_prior(quality: pd.DataFrame, predicted: Array) -> str | None:
    """Return why the fit does not prefer the optimum to the prior; None if it does.

    Args:
        quality: as from :func:`cross_validation`.
        predicted: [2] predicted target loss of the optimum and of the prior.
    """
    target = quality.iloc[-1]
    if target.mae >= target.mae_of_a_constant:
        return NO_BETTER
    if predicted[0] >= predicted[1]:
        return "the fit predicts no gain over it"
    return None


def fit_problems(quality: pd.DataFrame) -> list[str]:
    """Return a warning if a constant or a linear fit predicts the target better than the fit."""
    target = quality.iloc[-1]
    if target.mae >= target.mae_of_a_constant:
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
