"""How good a fit is on runs that it had not seen: each loss by itself, and the target of them all.

A target can be worse predicted than any loss in it: where one domain's loss falls another's rises,
and what is left of their mean is noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from megatron_chameleon.methods.common.table import aligned
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import FitQuality, quality_of, target_quality

MOST_METRICS = 40


@dataclasses.dataclass(frozen=True, eq=False)
class Judgement:
    """A fit and a linear one, on runs that neither had seen.

    Attributes:
        fit: of each of m losses.
        linear: the same of the linear fit.
        fit_of_target: of the one weighted sum that is minimised.
        linear_of_target: the same of the linear fit.
        measured_by: how the runs were left out, in a word or two.
    """

    fit: FitQuality
    linear: FitQuality
    fit_of_target: FitQuality
    linear_of_target: FitQuality
    measured_by: str

    @property
    def is_no_better_than_a_constant(self) -> bool:
        """Whether the fit's error of the target is that of a constant, or more."""
        return bool(self.fit_of_target.mae[0] >= self.fit_of_target.spread[0])

    @property
    def is_behind_a_linear_fit(self) -> bool:
        """Whether a linear fit has the smaller error of the target."""
        return bool(self.fit_of_target.mae[0] > self.linear_of_target.mae[0])


def judged(fit: Array, linear: Array, losses: Array, shares: Array, measured_by: str) -> Judgement:
    """Judge predictions ``fit`` and ``linear`` [n, m] of held-out ``losses`` [n, m].

    Args:
        fit: what the fit predicts for runs that were left out of it.
        linear: what the linear fit does.
        losses: what they came to.
        shares: [m] of the losses in the target.
        measured_by: how they were left out.
    """
    return Judgement(
        fit=quality_of(fit, losses),
        linear=quality_of(linear, losses),
        fit_of_target=target_quality(fit, losses, shares),
        linear_of_target=target_quality(linear, losses, shares),
        measured_by=measured_by,
    )


def parameters_of(metrics: Sequence[str], judgement: Judgement) -> dict[str, Any]:
    """The judgement for the mixture's file."""
    fit, linear = judgement.fit_of_target, judgement.linear_of_target
    return {
        "measured_by": judgement.measured_by,
        "target": {
            "spearman": plain(fit.spearman[0]),
            "mae": float(fit.mae[0]),
            "mae_of_a_constant": float(fit.spread[0]),
            "linear_spearman": plain(linear.spearman[0]),
            "linear_mae": float(linear.mae[0]),
        },
        "spearman": by_name(metrics, judgement.fit.spearman),
        "mae": by_name(metrics, judgement.fit.mae),
        "mae_of_a_constant": by_name(metrics, judgement.fit.spread),
        "linear_spearman": by_name(metrics, judgement.linear.spearman),
        "linear_mae": by_name(metrics, judgement.linear.mae),
    }


def by_name(names: Sequence[str], values: Array) -> dict[str, float | None]:
    """Name -> value, as JSON takes it."""
    return {name: plain(value) for name, value in zip(names, values.tolist(), strict=True)}


def plain(value: float) -> float | None:
    """JSON has no NaN: None."""
    return None if math.isnan(value) else float(value)


def lines_of(metrics: Sequence[str], shares: Array, judgement: Judgement, remedy: str) -> list[str]:
    """The table of the judgement, and the verdict where it is not good.

    Args:
        metrics: what the m losses are of.
        shares: [m] of them in the target.
        judgement: of the fit.
        remedy: what may help.
    """
    lines = [
        f"the fit on runs that it had not seen ({judgement.measured_by}; * is in the target):",
        *_table(metrics, shares, judgement),
    ]
    if judgement.is_no_better_than_a_constant:
        lines.append(
            "the fit predicts the target no better than a constant, so the mixture says nothing: "
            f"{remedy}"
        )
    elif judgement.is_behind_a_linear_fit:
        lines.append(
            f"a linear fit predicts the target better, so the mixture is uncertain: {remedy}"
        )
    return lines


def _table(metrics: Sequence[str], shares: Array, judgement: Judgement) -> list[str]:
    """A line for each loss and one for the target: the fit's figures, and those of a linear one."""
    headings = ["loss", "Spearman", "error", "linear: Spearman", "error", "error of a constant"]
    rows = [headings]
    for place, metric in enumerate(metrics[:MOST_METRICS]):
        name = metric + ("*" if shares[place] else "")
        rows.append([name, *_figures(judgement.fit, judgement.linear, place)])
    rows.append(["the target", *_figures(judgement.fit_of_target, judgement.linear_of_target, 0)])
    lines = aligned(rows)
    if len(metrics) > MOST_METRICS:
        lines.append(f"... and {len(metrics) - MOST_METRICS} more losses; the file has all of them")
    return lines


def _figures(fit: FitQuality, linear: FitQuality, place: int) -> list[str]:
    return [
        _correlation(fit.spearman[place]),
        f"{fit.mae[place]:.4f}",
        _correlation(linear.spearman[place]),
        f"{linear.mae[place]:.4f}",
        f"{fit.spread[place]:.4f}",
    ]


def _correlation(value: float) -> str:
    return "constant" if math.isnan(value) else f"{value:.3f}"
