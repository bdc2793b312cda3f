"""AdamW over stacked weights: one update for all members, each clipped by its own norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from megatron_chameleon.options.training import OptimizerOptions
from megatron_chameleon.training.optimizer import build_scheduler

MOMENTS = ("exp_avg", "exp_avg_sq")
# megatron-core's, in its clipping.
NORM_EPSILON = 1e-6


class StackedAdamW:
    """What a run's optimizer does to one model, for each member of a stack.

    Decoupled weight decay on matrices only; gradients clipped by the norm over all of a member's
    tensors; the same schedule. Nothing waits for the device.

    Args:
        weights: name -> [E, ...] float32 with gradients.
        options: of each member's updates.
        train_iters: steps of the whole training.
        step: steps that have been taken.
        moments: "NAME.exp_avg" and "NAME.exp_avg_sq" -> [E, ...], after ``step`` steps.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.nn.Parameter],
        options: OptimizerOptions,
        train_iters: int,
        step: int,
        moments: Mapping[str, torch.Tensor],
    ) -> None:
        self._weights, self._clip_grad = weights, options.clip_grad
        matrices = [parameter for parameter in weights.values() if parameter.dim() == 3]
        vectors = [parameter for parameter in weights.values() if parameter.dim() == 2]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "wd_mult": 1.0}, {"params": vectors, "wd_mult": 0.0}],
            lr=options.lr,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
            fused=True,
        )
        # It reads and writes parameter groups alone, which torch's optimizers have too.
        self._schedule = build_scheduler(cast(Any, self._adamw), options, train_iters)
        self._schedule.step(step)
        for name, parameter in weights.items():
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(step), device=parameter.device),
                **{moment: moments[f"{name}.{moment}"] for moment in MOMENTS},
            }

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Update all members; returns their gradients' norms [E] before clipping, on the device.

        Where a norm is not finite, that member's weights are spoilt, and no other's.
        """
        gradients = [_gradient(parameter) for parameter in self._weights.values()]
        norms = gradient_norms(gradients)
        if self._clip_grad > 0:
            factors = (self._clip_grad / (norms + NORM_EPSILON)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))
        self._schedule.step(1)  # before the update, so that the first step does not run at rate 0
        self._adamw.step()
        return norms

    def moments(self) -> dict[str, torch.Tensor]:
        """What the constructor takes, of now."""
        return {
            f"{name}.{moment}": self._adamw.state[parameter][moment]
            for name, parameter in self._weights.items()
            for moment in MOMENTS
        }


def no_moments(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the constructor takes before the first step of ``weights``."""
    return {
        f"{name}.{moment}": torch.zeros_like(tensor)
        for name, tensor in weights.items()
        for moment in MOMENTS
    }


def gradient_norms(gradients: list[torch.Tensor]) -> torch.Tensor:
    """[E] float32: of each member, the norm over all of its ``gradients`` [E, ...]."""
    of_tensors = [torch.linalg.vector_norm(part.flatten(1), dim=1) for part in gradients]
    return torch.linalg.vector_norm(torch.stack(of_tensors), dim=0)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad
