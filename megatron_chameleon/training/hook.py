"""How a method watches training, and what of it a method may change.

A method subclasses :class:`TrainingHook` and overrides what it needs. The loop names no method, and
without a hook it does nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_chameleon.model.memory import FLOAT32_BYTES, TrainingSetup, optimized_parameters
from megatron_chameleon.training.domain_gradients import DomainGradients
from megatron_chameleon.training.global_batch import GlobalBatch


class TrainingHook:
    """Every rank holds one, calls the same methods in the same order, and gets the same answers.

    What a hook decides must depend only on what all ranks share: its own state, the sums over all
    ranks that it is given, and the step.

    Attributes:
        combines_gradients: whether :meth:`gradient_weights` is asked at every step.
        mixture_interval: steps between two calls of :meth:`new_mixture`; 0 for none. The run needs
            an order of samples that allows other weights (``--permutation epoch`` or feistel).
        flops: floating-point operations spent beyond those of training, since the process began.
    """

    combines_gradients: bool = False
    mixture_interval: int = 0

    def __init__(self) -> None:
        self.flops = 0.0

    def prepare(self) -> None:
        """Take the memory of the device that is needed as long as the run is trained.

        It is called once, before the model is built and the first step is tried, and not where
        nothing is left to train.
        """

    def extra_bytes(self, setup: TrainingSetup, stage: int, num_domains: int) -> dict[str, int]:
        """What each rank of a pipeline stage holds for the hook, in bytes by name.

        It is for the advice where memory does not suffice. Gradients that are combined are held for
        it; an override adds what :meth:`prepare` takes.
        """
        if not self.combines_gradients:
            return {}
        held = num_domains * optimized_parameters(setup, stage) * FLOAT32_BYTES
        return {f"gradients of {num_domains} domains": held}

    def loss_weights(self, batch: GlobalBatch) -> torch.Tensor | None:
        """Look at a step's global batch before the backward pass.

        Returns:
            [k] what the loss of each domain's tokens counts, or None for 1. The loss that is
            trained on is the sum over tokens of weight times loss, over the number of tokens.
        """
        return None

    def gradient_weights(self, gradients: DomainGradients) -> torch.Tensor:
        """Look at the gradient of each domain's mean loss, after the backward pass.

        ``gradients.learning_rate`` is that of the update to come.

        Returns:
            [k] the weights by which the gradients are summed to the one that is trained by; unless
            overridden, the domains' shares of the batch's tokens, which give the plain gradient.
        """
        return gradients.domain_tokens / gradients.domain_tokens.sum().clamp(min=1.0)

    def new_mixture(self, step: int, model: Sequence[torch.nn.Module]) -> Sequence[float] | None:
        """Decide on the mixture after ``step`` steps, before the next batch is drawn.

        Args:
            step: steps done; a multiple of ``mixture_interval``, not 0.
            model: this rank's chunks of the model, which may be run forward.

        Returns:
            Weights of the domains from here on, or None to leave them as they are.
        """
        return None

    def metrics(self) -> dict[str, Any]:
        """What goes to metrics.jsonl at every log interval, as JSON values."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """All that a continued run needs, as JSON values.

        It is asked for before each step too, after :meth:`new_mixture`, so that a step that is
        skipped can be undone; keep it small.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become again what gave ``state`` by :meth:`state_dict`.

        That is when a run is continued, and after each step that did not update the model: what
        :meth:`loss_weights` and :meth:`gradient_weights` learnt from its loss and gradients, which
        may be no numbers, is undone.
        """
