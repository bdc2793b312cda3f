"""Data Mixing Laws: fit an exponential law to each loss of runs, and find the best mixture.

Ye et al.: Data Mixing Laws, ICLR 2025. As in section 4, the losses are first extrapolated to the
target's steps, then to its model size; the mixing laws are fitted to the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.interchange.mixture_runs import MixtureRuns
from megatron_chameleon.methods.mixing_laws import (
    MIN_POINTS,
    MixingLawsOptions,
    layer_parameters,
)
from megatron_chameleon.methods.output import by_name, warn
from megatron_chameleon.methods.swarm.fit import FitMethod, Fitted
from megatron_chameleon.methods.swarm.folder import SwarmResult
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import folds_of
from megatron_chameleon.mixture.mixing_laws import (
    LawSettings,
    fit_mixing_laws,
    fit_power_laws,
    law_optimum,
)
from megatron_chameleon.progress import SECONDS_WITHOUT_BAR, progress_bar

MIN_RUNS = 4
MAX_FOLDS = 128
# Below this weight in all runs, a domain hardly changes the losses, so that noise and the ridge
# determine its exponents: an optimum beyond the runs would be arbitrary.
RARE_WEIGHT = 0.01


class MixingLawsFit(FitMethod[MixingLawsOptions]):
    """Data Mixing Laws: fit a law to each loss of a swarm, and minimize the laws' weighted sum."""

    name, swarm_folder = "mixing-laws", "swarm-{}"

    def check_number_of_runs(self, count: int) -> None:
        """Raise UserError unless a law can be fitted with one run held out."""
        if count < MIN_RUNS:
            raise UserError(f"{count} runs are too few for a law; use {MIN_RUNS} or more")

    @property
    def models(self) -> Sequence[str]:
        """``--models``, without repetitions; default: the swarm's model size."""
        return list(dict.fromkeys(self.options.laws.models)) or super().models

    def losses_to_fit(
        self, swarms: Mapping[str, SwarmResult]
    ) -> tuple[Array, list[str], dict[str, Any]]:
        """Extrapolate the losses to the target's steps and size, by power laws."""
        target, lines = self.options.laws, list[str]()
        parameters: dict[str, Any] = {}
        by_size = {name: swarm.losses[:, -1] for name, swarm in swarms.items()}
        if target.target_steps is not None:
            for name, swarm in swarms.items():
                steps = np.array(swarm.steps, np.float64)
                used = steps >= self.options.first_step
                steps, curves = steps[used], swarm.losses[:, used].swapaxes(1, 2)
                by_size[name], exponent = _power_law(steps, curves, float(target.target_steps))
                error, ahead = None, ""
                # To estimate the error, predict the last measurement from the others.
                if len(steps) > MIN_POINTS:
                    predicted, _ = _power_law(steps[:-1], curves[..., :-1], steps[-1])
                    error = float(np.nanmean(np.abs(predicted - curves[..., -1])))
                    ahead = f"; mean error of predicting the last measurement: {error:.4f}"
                lines.append(
                    f"the losses of {name} were extrapolated to step {target.target_steps:,} by a "
                    f"power law with exponent {exponent:.3g}{ahead}"
                )
                parameters[f"step_law_{name}"] = {"exponent": exponent, "backtest_mae": error}
        if target.target_model is None:
            (losses,) = by_size.values()
            return losses, lines, parameters
        names = sorted(by_size, key=layer_parameters)
        sizes = np.array([layer_parameters(name) for name in names])
        curves = np.stack([by_size[name] for name in names], axis=2)
        losses, exponent = _power_law(sizes, curves, layer_parameters(target.target_model))
        lines.append(
            f"the losses were extrapolated from {', '.join(by_size)} to {target.target_model} by a "
            f"power law with exponent {exponent:.3g}"
        )
        parameters["size_law"] = {"exponent": exponent, "sizes": list(by_size)}
        return losses, lines, parameters

    def fit(self, table: MixtureRuns, shares: Array) -> Fitted:
        """Fit a law to every loss, and find the mixture that minimizes their weighted sum."""
        options, domains = self.options.laws, self.space.names
        # The unknowns of a law are a constant, a scale, and one exponent per domain.
        unknowns = len(domains) + 2
        if len(table.keys) < unknowns:
            warn(
                f"each law has {unknowns} unknowns but is fitted to only {len(table.keys)} runs, "
                "so --law-ridge mostly determines the laws: check the error on held-out runs, or "
                "train more proxies"
            )
        settings = LawSettings(
            huber_delta=options.huber_delta,
            ridge=options.law_ridge,
            num_starts=options.num_starts,
            seed=options.fit_seed,
        )
        total = len(table.metrics)
        with progress_bar(total, " laws", "fitting", delay=SECONDS_WITHOUT_BAR) as bar:
            try:
                laws = fit_mixing_laws(table.mixtures, table.losses, settings, on_fit=bar.update)
            except ValueError as error:
                raise UserError(f"{error}; leave such columns out of --metrics") from error
        most = table.mixtures.max(axis=0)
        # Domains that no run sampled keep weight 0.
        low, high = np.zeros(len(domains)), (most > 0).astype(np.float64)
        if (margin := options.max_extrapolation) is not None:
            low = np.maximum(table.mixtures.min(axis=0) - margin, 0.0) * high
            high = np.minimum(most + margin, 1.0) * high
        elif (rare := (most > 0) & (most < RARE_WEIGHT)).any():
            high[rare] = most[rare]
            named = format_names([domains[position] for position in np.flatnonzero(rare)])
            warn(
                f"no run has a weight of {RARE_WEIGHT:.0%} or more for {named}, so the laws do not "
                "determine the effect of larger weights, and each of these weights is at most the "
                "largest of the runs: train proxies with more of this text, or pass "
                "--max-extrapolation"
            )
        optimum = law_optimum(laws, shares, low, high, start=np.mean(table.mixtures, axis=0))
        # If there are at most MAX_FOLDS runs, each run is its own fold.
        folds = folds_of(len(table.keys), min(len(table.keys), MAX_FOLDS), options.fit_seed)
        return Fitted(
            heading=f"Data Mixing Laws: {len(table.metrics)} laws over {len(domains)} domains, "
            f"minimized by a grid search in steps of 1/{optimum.grid_steps} and a local search",
            optimum=self.within_epochs(optimum.weights),
            free_optimum=optimum.weights,
            predict=laws.predict,
            held_out=self.hold_out(
                lambda x, y: fit_mixing_laws(x, y, settings, near=laws).predict, table, folds
            ),
            folds=folds,
            parameters={
                "laws": {
                    metric: {
                        "constant": float(laws.constant[row]),
                        "scale": float(laws.scale[row]),
                        "exponents": by_name(domains, laws.exponents[row]),
                    }
                    for row, metric in enumerate(table.metrics)
                },
                "grid_optimum": by_name(domains, optimum.grid_weights),
                "predicted_target": optimum.predicted,
                "predicted_target_on_grid": optimum.grid_predicted,
            },
            remedy="more runs, or a larger --law-ridge, may help",
        )


def _power_law(x: Array, curves: Array, target: float) -> tuple[Array, float]:
    """Extrapolate ``curves`` [n, k, points] over ``x`` to ``target`` by a power law.

    Curves that contain NaN, from diverged members, are not fitted and are NaN at the target.

    Returns:
        Losses [n, k] at the target, and the exponent.
    """
    finite = np.isfinite(curves).all(axis=2)
    law = fit_power_laws(x, curves[finite])
    losses = np.full(finite.shape, np.nan)
    losses[finite] = law.predict(target)
    return losses, law.exponent
