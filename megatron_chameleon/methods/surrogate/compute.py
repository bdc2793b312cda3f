"""Surrogate: fit stacked models to the losses of runs, and find the best mixture within bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import rel_entr

from megatron_chameleon.console import align_columns
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange.mixture_runs import MixtureRuns
from megatron_chameleon.methods.limits import bounds_within
from megatron_chameleon.methods.output import by_name
from megatron_chameleon.methods.surrogate import SurrogateOptions
from megatron_chameleon.methods.swarm.fit import FitMethod, Fitted
from megatron_chameleon.methods.swarm.sampling import require_lightgbm
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import Predict
from megatron_chameleon.mixture.gain import CONFIDENCE, PredictedGain
from megatron_chameleon.mixture.optimum import (
    Limits,
    MixtureOptimum,
    minimize_mixture,
    nearest_mixtures,
)
from megatron_chameleon.mixture.surrogate import (
    FEWEST_RUNS,
    OPTIMISM_OF_ALL_RUNS,
    Surrogate,
    SurrogateReport,
    fit_surrogate,
    optimism_of_halves,
)
from megatron_chameleon.progress import SECONDS_WITHOUT_BAR, progress_bar

# Joint draws of the losses of the mixtures, for the intervals of their differences.
NUM_DRAWS = 4000
# The search for the optimum of half of the runs samples this many times fewer candidates.
HALVES_PER_SEARCH = 5
BASELINE_LABELS = {"uniform": "Uniform", "natural": "the natural mixture", "prior": "the prior"}


class SurrogateFit(FitMethod[SurrogateOptions]):
    """Fit stacked models, and minimize their predicted target loss within bounds."""

    name = "surrogate"

    def __init__(self, options: SurrogateOptions) -> None:
        super().__init__(options)
        require_lightgbm(f"--method {self.name}")
        # Which domains the runs sample is not known yet.
        self.bounds(np.ones(len(self.space.names)))

    def check_number_of_runs(self, count: int) -> None:
        """Raise UserError if a half of the runs is too small to be fitted."""
        if count < 2 * FEWEST_RUNS:
            raise UserError(
                f"{count} runs are too few: each half of them is fitted, which needs "
                f"{2 * FEWEST_RUNS} runs; add runs"
            )

    @property
    def weight_limits(self) -> tuple[str | None, str | None]:
        """Values of ``--min-weight`` and ``--max-weight``."""
        return self.options.optimum.min_weight, self.options.optimum.max_weight

    def bounds(self, sampled: Array, *, with_epochs: bool = True) -> tuple[Array, Array]:
        """Return the smallest and largest weights [k] that the options allow.

        Args:
            sampled: [k] 1 for domains that a run samples, and 0 for others.
            with_epochs: whether the epoch limit applies.

        Raises:
            UserError: if no mixture lies within the bounds.
        """
        options, names = self.options.optimum, self.space.names
        caps = []
        limit = self.caps
        if limit is not None and with_epochs:
            caps.append((limit, "--max-epochs"))
        has_text = self.token_shares > 0
        caps += [(has_text.astype(float), "no training tokens")]
        caps += [(sampled, "no run samples it")]
        if options.kl > 0:
            prior = self.options.fallback.prior
            caps.append(((self.prior > 0).astype(float), f"weight 0 in --prior {prior}"))
        return bounds_within(names, options.min_weight, options.max_weight, caps)

    def within_limits(self, mixtures: Array) -> tuple[Array, Array]:
        """Return the nearest mixtures within the bounds, and their penalties by ``--kl``."""
        mixtures = nearest_mixtures(mixtures, *self.bounds(np.ones(len(self.space.names))))
        if not (kl := self.options.optimum.kl):
            return mixtures, np.zeros(len(mixtures))
        return mixtures, kl * rel_entr(mixtures, self.prior).sum(axis=1)

    def fit(self, table: MixtureRuns, shares: Array) -> Fitted:
        """Fit stacked models to every loss; minimize the target loss within the bounds."""
        options, names = self.options.optimum, self.space.names
        sampled = np.any(table.mixtures, axis=0).astype(np.float64)
        bounds, seed = self.bounds(sampled), options.fit_seed
        try:
            surrogate = fit_surrogate(table.mixtures, table.losses, seed)
        except ValueError as error:
            raise UserError(f"{error}; leave such columns out of --metrics") from error

        def optimum_within(low: Array, high: Array) -> MixtureOptimum:
            with progress_bar(None, " mixtures", "searching", delay=SECONDS_WITHOUT_BAR) as bar:
                return minimize_mixture(
                    lambda mixtures: surrogate.mean(mixtures) @ shares,
                    self.prior,
                    low,
                    high,
                    kl=options.kl,
                    trained=table.mixtures,
                    num_draws=options.num_draws,
                    seed=seed,
                    on_values=bar.update,
                )

        optimum = free = optimum_within(*bounds)
        if self.options.max_epochs is not None:
            free = optimum_within(*self.bounds(sampled, with_epochs=False))
        uniform, prior = self.project_uniform(), self.limits().placed_prior
        baselines = {"uniform": uniform, "natural": self.token_shares, "prior": prior}
        optimism = self.optimism(table, shares, bounds)
        gains = predicted_gains(surrogate, optimum.weights, baselines, shares, optimism, seed)
        search = f"minimized over {optimum.num_values:,} mixtures"
        if options.kl > 0:
            search += (
                f", with {options.kl:g} times the divergence from the prior "
                f"'{self.options.fallback.prior}' "
                f"({max(optimum.divergence, 0.0):.4f} nats)"
            )
        models = model_errors(surrogate.report, table.metrics)
        return Fitted(
            headlines=headlines(gains, baselines, is_frozen=self.space.frozen is not None),
            heading=f"Surrogate: a stack of models for each loss, {search}",
            optimum=optimum.weights,
            free_optimum=free.weights,
            gain=gains["prior"],
            predict=surrogate.mean,
            held_out=surrogate.report.held_out,
            folds=surrogate.report.folds,
            parameters={
                "predicted_gain": {name: dataclasses.asdict(gain) for name, gain in gains.items()},
                "optimism": {
                    "of_half_of_the_runs": optimism.tolist(),
                    "subtracted": OPTIMISM_OF_ALL_RUNS * float(optimism.mean()),
                },
                "prior": by_name(names, self.prior),
                "kl": options.kl,
                "divergence": optimum.divergence if options.kl > 0 else None,
                "bounds": by_name(names, np.column_stack(bounds)),
                "models": models,
            },
            remedy="more runs may help",
            closing=(
                "cross-validated error of each model, and its share of the stack:",
                *model_table(models, shares),
            ),
        )

    def limits(self, *, with_epochs: bool = True) -> Limits:
        """Return the prior, and the bounds for a mixture that is not a result of the runs."""
        sampled = np.ones(len(self.space.names))
        return Limits(self.prior, *self.bounds(sampled, with_epochs=with_epochs))

    def optimism(self, table: MixtureRuns, shares: Array, bounds: tuple[Array, Array]) -> Array:
        """Return the optimism [splits] of optima of half of the runs, as in the search of all."""
        options, used = self.options.optimum, np.flatnonzero(shares)

        def search(target: Predict, trained: Array) -> Array:
            return minimize_mixture(
                target,
                self.prior,
                *bounds,
                kl=options.kl,
                trained=trained,
                num_draws=-(-options.num_draws // HALVES_PER_SEARCH),
                seed=options.fit_seed,
            ).weights

        with progress_bar(
            2 * options.splits, " fits", "cross-fitting", delay=SECONDS_WITHOUT_BAR
        ) as bar:
            return optimism_of_halves(
                table.mixtures,
                table.losses[:, used],
                shares[used],
                search,
                options.splits,
                options.fit_seed,
                bar.update,
            )


def predicted_gains(
    surrogate: Surrogate,
    weights: Array,
    baselines: Mapping[str, Array],
    shares: Array,
    optimism: Array,
    seed: int,
) -> dict[str, PredictedGain]:
    """Predict by how much ``weights`` [k] lower the target loss of each baseline [k].

    The gain is the difference of the predictions, less the optimism of the search that selected
    ``weights``. Its interval contains the central part of the differences in joint draws of the
    expected losses of both mixtures, less draws of the optimism, whose standard deviation is that
    of the splits.

    Args:
        surrogate: models of the m losses.
        weights: the mixture.
        baselines: name -> the mixture that it is compared with.
        shares: [m] share of each loss in the target.
        optimism: [splits] as from :func:`optimism_of_halves`.
        seed: random seed.
    """
    mixtures = np.stack([weights, *baselines.values()])
    mean = surrogate.mean(mixtures) @ shares
    drawn = surrogate.sample(mixtures, NUM_DRAWS, seed) @ shares  # [draws, mixtures]
    normal = np.random.default_rng([seed, 1]).normal(size=(NUM_DRAWS, 1))
    selected = optimism.mean() + optimism.std(ddof=1) * normal
    gains = drawn[:, 1:] - drawn[:, :1] - OPTIMISM_OF_ALL_RUNS * selected
    ends = np.quantile(gains, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    predicted = mean[1:] - mean[0] - OPTIMISM_OF_ALL_RUNS * optimism.mean()
    return {
        name: PredictedGain(float(gain), float(low), float(high), CONFIDENCE)
        for name, gain, low, high in zip(baselines, predicted, *ends, strict=True)
    }


def headlines(
    gains: Mapping[str, PredictedGain], baselines: Mapping[str, Array], *, is_frozen: bool
) -> list[str]:
    """Describe the gain over each baseline; baselines that may be as good come first.

    A baseline whose mixture an earlier one has is left out. With ``is_frozen``, all baselines have
    the ratios of ``--freeze``.
    """
    lines, seen = [], list[Array]()
    for name, gain in gains.items():
        if any(np.allclose(baselines[name], other, atol=1e-9) for other in seen):
            continue
        seen.append(baselines[name])
        baseline = BASELINE_LABELS[name] + " with the frozen ratios" * is_frozen
        lines.append((gain.low > 0, gain.describe(baseline)))
    return [line for _, line in sorted(lines, key=lambda each: each[0])]


def model_errors(report: SurrogateReport, metrics: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return model -> mae, spearman and share of the stack: metric -> number, or None."""
    rows = {}
    for model, quality in report.quality.items():
        share = report.weights.get(model)
        ranks = [None if np.isnan(rank) else float(rank) for rank in quality.spearman]
        rows[model] = {
            "mae": by_name(metrics, quality.mae),
            "spearman": dict(zip(metrics, ranks, strict=True)),
            "share": None if share is None else by_name(metrics, share),
        }
    return rows


def model_table(models: Mapping[str, Any], shares: Array) -> list[str]:
    """Format the result of :func:`model_errors` as a table; * marks losses in the target."""
    rows = [["loss"]]
    for name, model in models.items():
        rows[0] += [name] if model["share"] is None else [name, "share"]
    for loss, share in zip(next(iter(models.values()))["mae"], shares, strict=True):
        row = [f"{loss}*" if share else loss]
        for model in models.values():
            row.append(f"{model['mae'][loss]:.4f}")
            row += [] if model["share"] is None else [f"{model['share'][loss]:.2f}"]
        rows.append(row)
    return align_columns(rows)
