"""Base class of hooks that change the mixture of a run at regular intervals."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.methods.online import OnlineFlags
from megatron_chameleon.methods.output import by_name, warn
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.plan import TrainingPlan

# Weights are rounded to this many decimals, so that rounding errors, which differ between parallel
# layouts, do not change the samples.
DECIMALS = 6


class OnlineHook(TrainingHook):
    """A hook that changes the mixture every ``--online-interval`` steps.

    Domains with weight 0 in the run's mixture keep weight 0. A subclass computes new weights in
    :meth:`new_mixture` and passes them to :meth:`change`.

    Args:
        plan: plan of the run, with ``options.online.online`` set.
        layout: layout of the ranks.

    Attributes:
        online: options of the method.
        names: the domains with a weight.
        active: [k] bool, whether a domain of the run has a weight.
        initial: weights of ``names`` in the run's mixture, [K] float64.

    Raises:
        UserError: for fewer than two domains with a weight.
    """

    def __init__(self, plan: TrainingPlan, layout: Layout) -> None:
        super().__init__()
        assert isinstance(plan.options.online, OnlineFlags)
        self.online, self.layout = plan.options.online, layout
        self.mixture_interval = self.online.setting("online_interval") or 0
        weights = np.array(plan.schedule.weights_at(0), np.float64)
        self._weights: dict[str, float] = by_name(plan.data.names, weights / weights.sum())
        self.active = weights > 0
        self.names = [name for name, weight in self._weights.items() if weight > 0]
        self.initial = weights[self.active] / weights.sum()
        self._recomputed = 0
        if len(self.names) < 2:
            raise UserError(
                f"--online {self.online.online}: requires two domains with a weight above 0, but "
                f"in {plan.data.where} only '{self.names[0]}' has one; give another domain a "
                "weight, or leave out --online"
            )

    @property
    def weights(self) -> Array:
        """Weights of ``names`` in full precision, [K] float64."""
        return np.array([self._weights[name] for name in self.names])

    @property
    def sampled(self) -> Array:
        """Rounded weights of ``names`` with which samples are drawn, [K] float64."""
        rounded = self.weights.round(DECIMALS)
        return rounded / rounded.sum()

    def change(self, step: int, weights: Array, details: str = "") -> list[float] | None:
        """Adopt new weights, which must be equal on all ranks.

        Args:
            step: number of steps done.
            weights: new weights of ``names``, [K]. If any is not finite, the mixture is unchanged,
                with a warning.
            details: end of the log line.

        Returns:
            The rounded weights of all domains; None if they are unchanged.
        """
        if not np.isfinite(weights).all():
            warn(f"mixture unchanged at step {step}: its new weights are not finite")
            return None
        before = self._rounded()
        self._recomputed += 1
        rounded = self.perturb(weights)
        if rounded is None:
            return None
        after = self._rounded()
        if self.layout.is_main:
            order = sorted(after, key=lambda name: -abs(after[name] - before[name]))
            moves = [f"{name} {before[name]:.4f} -> {after[name]:.4f}" for name in order]
            print(f"mixture from step {step} on: {format_names(moves)}{details}")
        return rounded

    def perturb(self, weights: Array) -> list[float] | None:
        """Adopt weights for some steps, like :meth:`change`, but without a log line."""
        before = self._rounded()
        self._weights |= by_name(self.names, weights)
        after = self._rounded()
        return None if after == before else list(after.values())

    def _rounded(self) -> dict[str, float]:
        return {name: round(weight, DECIMALS) for name, weight in self._weights.items()}

    def metrics(self) -> dict[str, Any]:
        """Return the current rounded weights, and how often weights were recomputed."""
        return {"weights": self._rounded(), "recomputed": self._recomputed}

    def state_dict(self) -> dict[str, Any]:
        """Return the weights in full precision, and how often they were recomputed."""
        return {"weights": dict(self._weights), "recomputed": self._recomputed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``."""
        self._weights, self._recomputed = dict(state["weights"]), state["recomputed"]
