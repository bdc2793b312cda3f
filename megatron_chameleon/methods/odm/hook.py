"""Online Data Mixing during training: the domains' training losses are rewards of a bandit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_chameleon.methods.online.hook import OnlineHook
from megatron_chameleon.methods.output import by_name
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.odm import odm_weights, updated_rewards
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.training.plan import TrainingPlan


class OnlineDataMixing(OnlineHook):
    """ODM (Albalak et al. 2023, Algorithm 1): rewards at every step, weights at intervals.

    The paper changes the weights at every step. Here the rewards of every step are counted, but the
    weights change every ``--online-interval`` steps, since every change is recorded in run.json.
    Like in the paper, the run's mixture is used for the first hundredth of the steps only.

    Args:
        plan: plan of the run.
        layout: layout of the ranks.
    """

    def __init__(self, plan: TrainingPlan, layout: Layout) -> None:
        super().__init__(plan, layout)
        warmup = self.online.setting("online_warmup_iters")
        self._warmup = plan.options.train_iters // 100 if warmup is None else warmup
        self._smoothing: float = self.online.setting("online_smoothing")
        self._rewards = np.zeros(len(self.names))

    def end_step(self, step: int, losses: Array, tokens: Array) -> None:
        """Update the rewards by the losses of a step."""
        losses, tokens = losses[self.active], tokens[self.active]
        self._rewards = updated_rewards(
            self._rewards, losses, tokens, self.sampled, self._smoothing
        )

    def new_mixture(self, step: int, model: Sequence[torch.nn.Module]) -> list[float] | None:
        """Return the weights to use from ``step`` on; None if they are unchanged."""
        if step < self._warmup:
            return None
        # All ranks need equal weights, but the last digits may differ between processors.
        return self.change(step, from_main(lambda: odm_weights(self._rewards, step + 1)))

    def metrics(self) -> dict[str, Any]:
        """Return the weights and the reward of each domain, in nats."""
        return {**super().metrics(), "rewards": by_name(self.names, self._rewards)}

    def state_dict(self) -> dict[str, Any]:
        """Return weights and rewards."""
        return {**super().state_dict(), "rewards": by_name(self.names, self._rewards)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``."""
        super().load_state_dict(state)
        self._rewards = np.array([state["rewards"][name] for name in self.names])
