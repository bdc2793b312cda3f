"""Training hooks that weight losses or change the mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.hook import GlobalBatch, TrainingHook
from megatron_chameleon.training.plan import TrainingPlan


class WeightsHook(TrainingHook):
    """Base class of hooks whose weights [k] sum to 1 and are updated multiplicatively."""

    def __init__(self, plan: TrainingPlan, _layout: Layout) -> None:
        super().__init__()
        k = len(plan.data.names)
        self.weights = torch.full((k,), 1.0 / k, dtype=torch.float64)

    def learn(self, evidence: torch.Tensor) -> None:
        self.weights = torch.softmax(self.weights.log() + evidence.cpu(), dim=0)

    def metrics(self) -> dict[str, Any]:
        return {"weights": self.weights.tolist(), "flops": self.flops}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = torch.tensor(state["weights"], dtype=torch.float64)


class LossWeigher(WeightsHook):
    """Increase the loss weights of domains with high token losses."""

    bound = 5.0

    def loss_weights(self, batch: GlobalBatch) -> torch.Tensor:
        excess = [(losses - self.bound).clamp(min=0.0) for losses in batch.token_losses()]
        self.learn(batch.domain_sums(excess) / batch.domain_tokens.clamp(min=1.0))
        return self.weights * batch.num_domains


class MixtureChanger(WeightsHook):
    """Increase the mixture weights of domains with high losses, every four steps."""

    mixture_interval = 4

    def loss_weights(self, batch: GlobalBatch) -> None:
        losses = batch.domain_sums(batch.token_losses()) / batch.domain_tokens.clamp(min=1.0)
        self.learn(0.3 * losses)

    def new_mixture(self, step: int, model: Sequence[torch.nn.Module]) -> Sequence[float]:
        assert step % self.mixture_interval == 0
        return [round(weight, 6) for weight in self.weights.tolist()]
