"""Compare methods over several targets: one comparison of paired base models for each target.

``RUN/targets/NAME`` holds the comparison whose target is the held-out domain NAME of its corpus;
special characters of NAME are percent-encoded.
The gain of a mixture is the target's held-out loss with the baseline minus that with the mixture,
paired by seed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit
from scipy.stats import spearmanr

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.report import tables
from megatron_chameleon.report.compare_methods import (
    HINT,
    Array,
    ComparedMixture,
    holm_adjusted,
    load_comparison,
    mixture_label,
    write_comparison,
)
from megatron_chameleon.report.comparison import by_domain
from megatron_chameleon.report.options import CompareMethodsOptions
from megatron_chameleon.report.run_folder import REPORT, RunFolder
from megatron_chameleon.report.tables import Table

TARGETS = "targets"
PAGE_TITLE = "Methods compared on targets"
LEVEL = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class TargetComparison:
    """Results of m mixtures with s seeds on n targets.

    Attributes:
        options: options of the comparison.
        losses: loss of the target in nats per token, by target (rows), and mixture and seed
            (columns).
        mixtures: target -> name -> mixture.
    """

    options: CompareMethodsOptions
    losses: pd.DataFrame
    mixtures: Mapping[str, Mapping[str, ComparedMixture]]

    @property
    def methods(self) -> list[str]:
        """Names of the m - 1 mixtures other than the baseline."""
        return [name for name in self.options.mixtures if name != self.options.baseline]

    @property
    def baseline(self) -> Array:
        """[n, s] loss of the target with the baseline."""
        return self.losses[self.options.baseline].to_numpy()

    @functools.cached_property
    def gains(self) -> Array:
        """[n, m - 1, s] loss with the baseline minus loss with the mixture."""
        ours = [self.losses[name] for name in self.methods]
        return np.stack([self.baseline - each for each in ours], axis=1)

    @property
    def shares_models(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[n, m - 1] whether the mixture equals the baseline: the gain is 0 without any error."""
        base = mixture_label(self.options.baseline)
        return np.array(
            [
                [mixtures[name].same_as == base for name in self.methods]
                for mixtures in self.mixtures.values()
            ]
        )

    @property
    def means(self) -> Array:
        """[n, m - 1] gains, averaged over seeds."""
        means: Array = self.gains.mean(axis=2)
        return means

    @property
    def predicted(self) -> Array:
        """[n, m - 1] gain over the baseline that the method predicted; NaN if it predicts none."""
        baseline = self.options.baseline
        return np.array(
            [
                [predicted_gain_over(mixtures[name].mixture, baseline) for name in self.methods]
                for mixtures in self.mixtures.values()
            ]
        )

    @property
    def pooled_error(self) -> tuple[float, int]:
        """Standard error of a gain averaged over seeds, and its degrees of freedom.

        The variance between seeds is pooled over all targets and mixtures: with three seeds, the
        variance of a single gain has two degrees of freedom only, and no gain could be significant
        after the correction for all tests.
        """
        seeds = self.gains.shape[2]
        own = self.gains[~self.shares_models]
        freedom = len(own) * (seeds - 1)
        variance = float(own.var(axis=1, ddof=1).mean()) if len(own) else 0.0
        return math.sqrt(variance / seeds), freedom

    @property
    def p_values(self) -> Array:
        """[n, m - 1] p-values of the gains, corrected for all of them by Holm's method."""
        error, freedom = self.pooled_error
        if not error:
            return np.ones_like(self.means)
        plain = 2 * stdtr(freedom, -np.abs(self.means / error))
        tested = ~self.shares_models
        adjusted = np.ones_like(plain)
        adjusted[tested] = holm_adjusted(plain[tested])
        return adjusted


def predicted_gain_over(mixture: Mixture, baseline: str) -> float:
    """Return the gain that a method predicted for the written weights; NaN if there is none."""
    if mixture.parameters.get("written") == "prior":  # the estimate's gain is not that of the prior
        return (
            0.0 if len(set(mixture.weights.values())) == 1 and baseline == "uniform" else math.nan
        )
    gain = mixture.parameters.get("predicted_gain", {}).get(baseline)
    return math.nan if gain is None else float(gain["gain"])


def load_targets(options: CompareMethodsOptions) -> TargetComparison:
    """Read the comparisons of ``--targets`` in ``RUN/targets``, by default all of them.

    Raises:
        UserError: if there is none, or a target, mixture, run or evaluation is missing.
    """
    root = options.run / TARGETS
    if options.targets:
        folders = [root / file_name_of(name) for name in options.targets]
    else:
        folders = sorted(path for path in root.glob("*") if path.is_dir())
    if not folders:
        raise UserError(f"{root} has no comparison; {HINT} (TARGETS=...)")
    losses, mixtures = dict[str, "pd.Series[float]"](), dict[str, dict[str, ComparedMixture]]()
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--targets: {folder} does not exist; {HINT} (TARGETS=...)")
        run = RunFolder.load(folder)
        held_out = [] if run.corpus is None else list(run.corpus.held_out)
        target = next((name for name in held_out if file_name_of(name) == folder.name), None)
        if target is None:
            raise UserError(f"{folder}: its corpus must hold out the domain of this name")
        compared = load_comparison(run, options)
        losses[target] = by_domain(compared.results, "loss", ["mixture", "seed"]).loc[target]
        mixtures[target] = compared.mixtures
    return TargetComparison(options, pd.DataFrame(losses).T, mixtures)


def compare_targets(options: CompareMethodsOptions) -> TargetComparison:
    """Compare the mixtures over all targets, print the table, and write it to 7-report.

    Raises:
        UserError: as from :func:`load_targets`.
    """
    compared = load_targets(options)
    shown = [gain_table(compared)]
    if np.isfinite(compared.predicted).any():
        shown.append(prediction_table(compared))
    stem = options.run / REPORT / f"{options.name}-{TARGETS}"
    runs = [
        run
        for mixtures in compared.mixtures.values()
        for mixture in mixtures.values()
        for run in mixture.runs
    ]
    write_comparison(options, stem, PAGE_TITLE, shown, as_json(compared), runs)
    return compared


def gain_table(compared: TargetComparison) -> Table:
    """Tabulate the gain of each mixture on each target; * marks significant gains and losses."""
    means, p_values = compared.means, compared.p_values
    error, freedom = compared.pooled_error
    labels = [mixture_label(name) for name in compared.methods]
    baseline = mixture_label(compared.options.baseline)
    rows = [
        [
            target,
            f"{loss:.3f}",
            *(
                "= " + baseline if same else f"{gain:+.3f}{'*' if p < LEVEL else ''}"
                for gain, p, same in zip(*row, strict=True)
            ),
        ]
        for target, loss, *row in zip(
            compared.losses.index,
            compared.baseline.mean(axis=1),
            means,
            p_values,
            compared.shares_models,
            strict=True,
        )
    ]
    count = len(means)
    spread = means.std(axis=0, ddof=min(count - 1, 1))
    better = ((means > 0) & (p_values < LEVEL)).sum(axis=0)
    worse = ((means < 0) & (p_values < LEVEL)).sum(axis=0)
    summary = [
        ["mean gain", *(f"{mean:+.3f}" for mean in means.mean(axis=0))],
        [
            "its standard error over targets",
            *(f"{v:.3f}" if count > 1 else tables.MISSING for v in spread / math.sqrt(count)),
        ],
        ["significantly better", *(f"{number} of {count}" for number in better)],
        ["significantly worse", *(f"{number} of {count}" for number in worse)],
    ]
    half = float(stdtrit(freedom, 0.975)) * error if freedom else 0.0
    notes = [
        f"Gain: held-out loss of the target with {baseline} minus that with the mixture, in nats "
        f"per token, averaged over {compared.gains.shape[2]} paired seeds; the target is not "
        "trained on. Positive gains are better.",
        f"* significant at {LEVEL:.0%} after Holm's correction for all gains of the table, by "
        f"Student's t with a variance between seeds that is pooled over targets and mixtures "
        f"({freedom} degrees of freedom). Half of an uncorrected 95% interval: {half:.3f}.",
        f"'= {baseline}': the method wrote the weights of {baseline}.",
    ]
    header = ["target", f"loss with {baseline}", *labels]
    return Table.of("Gains on held-out targets", header, rows, summary, notes)


def prediction_table(compared: TargetComparison) -> Table:
    """Tabulate how well each method predicts its gains."""
    rows = []
    for name, predicted, real in zip(
        compared.methods, compared.predicted.T, compared.means.T, strict=True
    ):
        known = np.isfinite(predicted)
        if known.sum() < 3:
            continue
        predicted, real = predicted[known], real[known]
        has_spread = np.ptp(predicted) > 0 and np.ptp(real) > 0
        rows.append(
            [
                mixture_label(name),
                f"{known.sum()}",
                f"{predicted.mean():+.3f}",
                f"{real.mean():+.3f}",
                f"{np.abs(predicted - real).mean():.3f}",
                f"{np.corrcoef(predicted, real)[0, 1]:.2f}" if has_spread else "-",
                f"{spearmanr(predicted, real).statistic:.2f}" if has_spread else "-",
            ]
        )
    header = [
        "method",
        "targets",
        "predicted gain",
        "measured gain",
        "mean error",
        "Pearson",
        "Spearman",
    ]
    return Table.of("Predicted and measured gains", header, rows)


def as_json(compared: TargetComparison) -> dict[str, Any]:
    """Return all figures, unrounded."""
    error, freedom = compared.pooled_error

    def by_method(values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(compared.methods, values, strict=True))

    found: Mapping[str, Any] = {
        target: {
            "baseline_loss": compared.baseline[row].tolist(),
            "gain": by_method(compared.gains[row].tolist()),
            "p_value_holm": by_method(compared.p_values[row].tolist()),
            "predicted_gain": {
                name: value
                for name, value in by_method(compared.predicted[row].tolist()).items()
                if math.isfinite(value)
            },
            "equals_baseline": by_method(compared.shares_models[row].tolist()),
            "weights": {name: mixtures[name].mixture.weights for name in compared.methods},
        }
        for row, (target, mixtures) in enumerate(compared.mixtures.items())
    }
    means = pd.DataFrame(compared.means, columns=compared.methods)
    return {
        "seeds": list(compared.options.seeds),
        "baseline": compared.options.baseline,
        "mixtures": list(compared.options.mixtures),
        "targets": found,
        "mean_gain": means.mean().to_dict(),
        "pooled_standard_error": error,
        "degrees_of_freedom": freedom,
    }
