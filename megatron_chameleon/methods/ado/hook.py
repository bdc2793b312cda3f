"""Adaptive Data Optimization during training: scaling laws of the domains' training losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_chameleon.methods.online.hook import OnlineHook
from megatron_chameleon.methods.output import by_name
from megatron_chameleon.mixture.ado import AdoState, fit_scaling_laws, preference
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.training.plan import TrainingPlan

# Steps to leave out of the fits in the authors' code.
WARMUP = 1000
MAX_POINTS = 128
FEWEST_POINTS = 3


class LossHistory:
    """Losses and tokens of each domain, summed over at most ``MAX_POINTS`` ranges of steps.

    When there are more ranges, each two adjacent ranges are merged. So the memory does not depend
    on the number of steps.

    Args:
        num_domains: number of domains (K).
    """

    def __init__(self, num_domains: int) -> None:
        self.width = 1
        """Number of steps in each range except the last."""
        self.points = np.zeros((0, 2 + 2 * num_domains))
        """A row per range: steps, sum of their numbers, K summed losses, K numbers of tokens."""

    def add(self, step: int, losses: Array, tokens: Array) -> None:
        """Add the summed losses [K] and tokens [K] of a step."""
        row = np.concatenate([[1.0, float(step)], losses, tokens])
        if len(self.points) and self.points[-1, 0] < self.width:
            self.points[-1] += row
            return
        if len(self.points) == MAX_POINTS:
            self.points = self.points[::2] + self.points[1::2]
            self.width *= 2
        self.points = np.vstack([self.points, row])

    def arrays(self) -> tuple[Array, Array, Array]:
        """Mean step number [T], mean losses [T, K] and tokens [T, K] of each range."""
        losses, tokens = np.split(self.points[:, 2:], 2, axis=1)
        return self.points[:, 1] / self.points[:, 0], losses / np.maximum(tokens, 1), tokens


class AdaptiveDataOptimization(OnlineHook):
    """ADO (Jiang et al. 2024): at every update, fit the laws again and update the policy.

    The mixture of the run is the prior. It is used without changes in the first steps, whose losses
    are not fitted.

    Args:
        plan: plan of the run.
        layout: layout of the ranks.
    """

    def __init__(self, plan: TrainingPlan, layout: Layout) -> None:
        super().__init__(plan, layout)
        warmup = self.online.setting("online_warmup_iters")
        self._warmup = min(WARMUP, plan.options.train_iters // 10) if warmup is None else warmup
        self._batch_size = plan.options.global_batch_size
        self._state = AdoState.first(self.initial)
        self._history = LossHistory(len(self.names))

    def end_step(self, step: int, losses: Array, tokens: Array) -> None:
        """Add the losses of a step to the history."""
        if step > self._warmup:
            self._history.add(step, losses[self.active], tokens[self.active])

    def new_mixture(self, step: int, model: Sequence[torch.nn.Module]) -> list[float] | None:
        """Return the weights to use from ``step`` on; None if they are unchanged."""
        if len(self._history.points) < FEWEST_POINTS:  # the preference of these steps is the prior
            self._state = dataclasses.replace(self._state, step=step)
            return None
        # All ranks need equal weights, but the last digits may differ between processors.
        self._state = from_main(lambda: self._updated(step))
        return self.change(step, self._state.policy)

    def _updated(self, step: int) -> AdoState:
        steps, losses, tokens = self._history.arrays()
        laws = fit_scaling_laws(steps * self._batch_size, losses, tokens)
        preferred = preference(
            self.initial,
            self._state.credit_at(step),
            laws.learning_speed(step * self._batch_size),
            self.online.setting("ado_min_weight"),
        )
        return self._state.updated(step, preferred, self.online.setting("online_smoothing"))

    def metrics(self) -> dict[str, Any]:
        """Return the weights and the credit of each domain."""
        return {**super().metrics(), "credit": by_name(self.names, self._state.credit)}

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, the policy's state and the history of losses."""
        fields = dataclasses.asdict(self._state).items()
        policy = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in fields}
        history = {"width": self._history.width, "points": self._history.points.tolist()}
        return {**super().state_dict(), "policy": policy, "history": history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``."""
        super().load_state_dict(state)
        policy = state["policy"]
        arrays = {name: np.array(policy[name]) for name in ("policy", "credit", "average")}
        self._state = AdoState(**arrays, step=policy["step"])
        self._history.width = state["history"]["width"]
        shape = (-1, self._history.points.shape[1])
        self._history.points = np.array(state["history"]["points"], np.float64).reshape(shape)
