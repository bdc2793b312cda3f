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
from collections.abc import Mapping
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
    ComparedMixture,
    load_comparison,
    mixture_label,
    write_comparison,
)
from megatron_chameleon.report.options import CompareMethodsOptions
from megatron_chameleon.report.results import by_domain
from megatron_chameleon.report.run_folder import REPORT, RunFolder
from megatron_chameleon.report.significance import holm_adjusted
from megatron_chameleon.report.tables import Table

TARGETS = "targets"
PAGE_TITLE = "Methods compared on targets"
LEVEL = 0.05
# Names of the rows below the gains.
SUMMARY = (
    *("mean gain", "its standard error over targets"),
    *("significantly better", "significantly worse"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class TargetComparison:
    """Results of mixtures with s seeds on n targets.

    Attributes:
        options: options of the comparison.
        losses: [n, m * s] loss of the target in nats per token, by target (rows), and mixture and
            seed (columns).
        mixtures: target -> name -> mixture.
    """

    options: CompareMethodsOptions
    losses: pd.DataFrame
    mixtures: Mapping[str, Mapping[str, ComparedMixture]]

    @property
    def methods(self) -> list[str]:
        """Names of the mixtures other than the baseline."""
        return [name for name in self.options.mixtures if name != self.options.baseline]

    def gains(self, method: str) -> pd.DataFrame:
        """[n, s] loss with the baseline minus loss with the mixture, by target and seed."""
        return self.losses[self.options.baseline] - self.losses[method]

    @functools.cached_property
    def pooled_error(self) -> tuple[float, int]:
        """Standard error of a gain averaged over seeds, and its degrees of freedom.

        The variance between seeds is pooled over all targets and mixtures: with three seeds, the
        variance of a single gain has two degrees of freedom only, and no gain could be significant
        after the correction for all tests.
        """
        gains = np.stack([self.gains(name) for name in self.methods], axis=1)
        own = gains[~np.stack([self._equals(name) for name in self.methods], axis=1)]
        seeds = gains.shape[2]
        variance = float(own.var(axis=1, ddof=1).mean()) if len(own) else 0.0
        return math.sqrt(variance / seeds), len(own) * (seeds - 1)

    def _equals(self, method: str) -> pd.Series[bool]:
        base = mixture_label(self.options.baseline)
        return pd.Series({t: found[method].same_as == base for t, found in self.mixtures.items()})

    @functools.cached_property
    def table(self) -> pd.DataFrame:
        """One row per target and method.

        Columns: target, method, gain (mean over seeds), predicted (the gain over the baseline that
        the method predicted; NaN if it predicts none), equals_baseline (whether the mixture equals
        the baseline, so that the gain is 0 without any error), and p_value (corrected for all gains
        by Holm's method).
        """
        baseline = self.options.baseline
        table = pd.concat(
            [
                pd.DataFrame(
                    {
                        "method": name,
                        "gain": self.gains(name).mean(axis=1),
                        "predicted": [
                            predicted_gain_over(found[name].mixture, baseline)
                            for found in self.mixtures.values()
                        ],
                        "equals_baseline": self._equals(name),
                        "p_value": 1.0,
                    }
                )
                for name in self.methods
            ]
        ).reset_index(names="target")
        error, freedom = self.pooled_error
        if error:
            tested = ~table["equals_baseline"]
            plain = 2 * stdtr(freedom, -np.abs(table["gain"][tested].to_numpy() / error))
            table.loc[tested, "p_value"] = holm_adjusted(plain)
        return table


def predicted_gain_over(mixture: Mixture, baseline: str) -> float:
    """Return the gain that a method predicted for the written weights; NaN if there is none."""
    if mixture.parameters.get("written") == "prior":  # the estimate's gain is not that of the prior
        return (
            0.0 if len(set(mixture.weights.values())) == 1 and baseline == "uniform" else math.nan
        )
    if mixture.parameters.get("frozen"):  # its baselines have the frozen ratios
        return math.nan
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
    if np.isfinite(compared.table["predicted"]).any():
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
    count, (error, freedom) = len(compared.losses), compared.pooled_error
    baseline = mixture_label(compared.options.baseline)
    losses = compared.losses[compared.options.baseline].mean(axis=1)
    columns, summary = [losses.map("{:.3f}".format).rename(f"loss with {baseline}")], []
    for name, rows in compared.table.groupby("method", sort=False):
        gains, is_significant = rows["gain"], rows["p_value"] < LEVEL
        texts = gains.map("{:+.3f}".format) + is_significant.map({True: "*", False: ""})
        texts = texts.mask(rows["equals_baseline"], f"= {baseline}")
        columns.append(texts.set_axis(rows["target"]).rename(mixture_label(str(name))))
        over_targets = f"{gains.std() / math.sqrt(count):.3f}" if count > 1 else tables.MISSING
        better, worse = (sum(is_significant & side) for side in (gains > 0, gains < 0))
        ends = (f"{better} of {count}", f"{worse} of {count}")
        summary.append((f"{gains.mean():+.3f}", over_targets, *ends))
    half = float(stdtrit(freedom, 0.975)) * error if freedom else 0.0
    notes = [
        f"Gain: held-out loss of the target with {baseline} minus that with the mixture, in nats "
        f"per token, averaged over {len(compared.options.seeds)} paired seeds; the target is not "
        "trained on. Positive gains are better.",
        f"* significant at {LEVEL:.0%} after Holm's correction for all gains of the table, by "
        f"Student's t with a variance between seeds that is pooled over targets and mixtures "
        f"({freedom} degrees of freedom). Half of an uncorrected 95% interval: {half:.3f}.",
        f"'= {baseline}': the method wrote the weights of {baseline}.",
    ]
    named = zip(SUMMARY, *summary, strict=True)
    texts = pd.concat(columns, axis=1)
    return Table.by_row("Gains on held-out targets", "target", texts, named, notes)


def prediction_table(compared: TargetComparison) -> Table:
    """Tabulate how well each method predicts its gains.

    A mixture that equals the baseline has a predicted and a measured gain of 0. At least three
    other mixtures are required for correlations.
    """
    rows = []
    for name, found in compared.table.dropna(subset="predicted").groupby("method", sort=False):
        predicted, real = found["predicted"].to_numpy(), found["gain"].to_numpy()
        if len(found) < 3:
            continue
        enough = (~found["equals_baseline"]).sum() >= 3
        has_spread = enough and np.ptp(predicted) > 0 and np.ptp(real) > 0
        rows.append(
            [
                mixture_label(str(name)),
                f"{len(found)}",
                f"{predicted.mean():+.3f}",
                f"{real.mean():+.3f}",
                f"{np.abs(predicted - real).mean():.3f}",
                f"{np.corrcoef(predicted, real)[0, 1]:.2f}" if has_spread else "-",
                f"{spearmanr(predicted, real).statistic:.2f}" if has_spread else "-",
            ]
        )
    header = ["method", "targets", "predicted gain", "measured gain", "mean error"]
    return Table.of("Predicted and measured gains", [*header, "Pearson", "Spearman"], rows)


def as_json(compared: TargetComparison) -> dict[str, Any]:
    """Return all figures, unrounded."""
    table, methods = compared.table.set_index("method"), compared.methods
    error, freedom = compared.pooled_error
    found = {}
    for target, mixtures in compared.mixtures.items():
        rows = table[table["target"] == target]
        found[target] = {
            "baseline_loss": compared.losses.loc[target, compared.options.baseline].tolist(),
            "gain": {name: compared.gains(name).loc[target].tolist() for name in methods},
            "p_value_holm": rows["p_value"].to_dict(),
            "predicted_gain": rows["predicted"].dropna().to_dict(),
            "equals_baseline": rows["equals_baseline"].to_dict(),
            "weights": {name: mixtures[name].mixture.weights for name in methods},
        }
    return {
        "seeds": list(compared.options.seeds),
        "baseline": compared.options.baseline,
        "mixtures": list(compared.options.mixtures),
        "targets": found,
        "mean_gain": {
            name: rows["gain"].mean() for name, rows in table.groupby(level=0, sort=False)
        },
        "pooled_standard_error": error,
        "degrees_of_freedom": freedom,
    }
