"""Training hooks: the callback interface for online methods, and the code that calls it.

A method subclasses :class:`TrainingHook` and overrides the callbacks that it needs. The trainer
does not depend on any method. A run without a method uses the base class, which does nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, HookState
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.sampler import Batch, to_device
from megatron_chameleon.errors import UserError
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.flops import forward_flops, training_flops
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.domain_gradients import (
    DomainGradients,
    micro_batches_by_domain,
)
from megatron_chameleon.training.metrics import sum_over_ranks
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.run_folder import FRESH_START
from megatron_chameleon.training.step import Passes

TokenValues = Sequence[torch.Tensor]
"""One tensor [b, s] per micro-batch of this rank, with a value per token; an empty list on ranks
before the last pipeline stage."""


class TrainingHook:
    """Base class of training hooks, called identically on every rank.

    A hook's decisions must depend only on values that all ranks share: the hook's own state,
    all-reduced sums and the step.

    Attributes:
        combines_gradients: whether :meth:`gradient_weights` is called at every step.
        mixture_interval: steps between two calls of :meth:`new_mixture`; 0 if it is not called.
            A positive value requires a sample order that allows mixture changes (``--permutation
            epoch`` or feistel).
        target_batch_size: samples of a target in each step, read by :meth:`target_batch`, for hooks
            that combine gradients; 0 without a target. The target is one more domain, the last, of
            the gradients. It is not part of the global batch.
        flops: floating-point operations of the hook, in addition to training, since the process
            started.
    """

    combines_gradients: bool = False
    mixture_interval: int = 0
    target_batch_size: int = 0

    def __init__(self) -> None:
        self.flops = 0.0

    def prepare(self) -> None:
        """Allocate the device memory that the hook needs throughout training.

        This method is called once, before the model is built and before the dry first step. It is
        not called if the run is already finished.
        """

    def loss_weights(self, batch: GlobalBatch) -> torch.Tensor | None:
        """Return per-domain loss weights; called with the global batch before the backward pass.

        Returns:
            [k] weight of the loss of each domain's tokens; None means that all weights are 1. The
            training loss is the sum over tokens of weight times loss, divided by the number of
            tokens.
        """
        return None

    def gradient_weights(self, gradients: DomainGradients) -> torch.Tensor:
        """Return the weights of the per-domain gradients; called after the backward pass.

        ``gradients.learning_rate`` is the learning rate of the update that follows.

        Returns:
            [k] weights of the gradients in the update, [k + 1] with a target; by default the
            domains' shares of the batch's tokens, which yield the standard gradient. A hook with a
            target must override this method, since its text is not to be trained on.
        """
        return gradients.domain_tokens / gradients.domain_tokens.sum().clamp(min=1.0)

    def target_batch(self, indices: Sequence[int]) -> Batch:
        """Read samples of the target, stacked; with ``target_batch_size`` only.

        Step t reads the samples t * ``target_batch_size`` to (t + 1) * ``target_batch_size`` - 1 in
        every layout. Each data-parallel rank reads some of them.
        """
        raise AssertionError("a hook with a target overrides this method")

    def end_step(self, step: int, losses: Array, tokens: Array) -> None:
        """Read the training losses of a step; called after each step that updated the model.

        All ranks get the same values, which the step has all-reduced anyway.

        Args:
            step: number of steps done, including this step.
            losses: [k] summed loss of each domain's tokens in the global batch, finite.
            tokens: [k] number of each domain's tokens with a loss; 0 for an absent domain.
        """

    def new_mixture(self, step: int, model: Sequence[torch.nn.Module]) -> Sequence[float] | None:
        """Return the mixture after ``step`` steps, before the next batch is sampled.

        Args:
            step: number of steps done; a positive multiple of ``mixture_interval``.
            model: this rank's chunks of the model, for forward passes.

        Returns:
            Domain weights from this step on, or None to keep the current weights.
        """
        return None

    def metrics(self) -> dict[str, Any]:
        """Return the JSON values that metrics.jsonl records at every log interval."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run restores, as JSON values.

        If the hook overrides :meth:`loss_weights` or combines gradients, this method is also called
        before each step, after :meth:`new_mixture`, so that a skipped step can be undone; keep the
        state of such a hook small.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`.

        This method is called when a run is resumed. It is also called after each skipped step if
        the hook overrides :meth:`loss_weights` or combines gradients, to undo changes that these
        callbacks made from a loss or gradient that may be NaN.
        """


@dataclasses.dataclass
class GlobalBatch:
    """This rank's micro-batches of one step, which a hook may read repeatedly.

    Per-token values exist on the last pipeline stage, sharded over the data-parallel ranks; sums
    over them are identical on every rank.

    Attributes:
        step: number of steps done before this step.
        micro_batches: this rank's micro-batches.
        passes: forward and backward passes of the trained model.
        config: the trained model.
        layout: layout of the ranks.
        hook: the training hook, whose FLOPs are counted.
    """

    step: int
    micro_batches: Sequence[Batch]
    passes: Passes
    config: ModelConfig
    layout: Layout
    hook: TrainingHook

    @property
    def num_domains(self) -> int:
        """Number of domains (k)."""
        return self.passes.num_domains

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the batch, over all ranks."""
        mine = sum(batch["tokens"].numel() for batch in self.micro_batches)
        return mine * self.layout.data_size

    def token_losses(
        self, other: Passes | None = None, other_config: ModelConfig | None = None
    ) -> list[torch.Tensor]:
        """Compute the losses of all tokens by a forward pass of the trained model or another model.

        Args:
            other: passes of another model in the same layout, such as a reference model; by
                default, the passes of the trained model.
            other_config: the other model, to count its FLOPs.
        """
        config = other_config or self.config
        self.hook.flops += forward_flops(config, self.num_tokens, self.passes.shape.seq_length)
        return (other or self.passes).token_losses(self.micro_batches)

    def domain_sums(self, values: TokenValues) -> torch.Tensor:
        """Sum ``values`` of unmasked tokens per domain, over all ranks: [k] float64.

        Args:
            values: the result of :meth:`token_losses`, or tensors computed from it.
        """
        sums = torch.zeros(self.num_domains, dtype=torch.float64, device=self.passes.device)
        # ``values`` is empty except on the last pipeline stage.
        for batch, value in zip(self.micro_batches, values, strict=bool(values)):
            masked = value.double() * batch["loss_mask"].to(value.device)
            sums.index_add_(0, batch["domain"].to(value.device), masked.sum(1))
        return sum_over_ranks(sums, self.layout)

    @functools.cached_property
    def domain_tokens(self) -> torch.Tensor:
        """Tokens with a loss per domain, over all ranks: [k] float64."""
        return self.domain_sums([torch.ones_like(b["loss_mask"]) for b in self.micro_batches])


HookFactory = Callable[[TrainingPlan, Layout], TrainingHook]


def build_hook(make: HookFactory | None, plan: TrainingPlan, layout: Layout) -> TrainingHook:
    """Build the run's hook in its initial state; the base class if ``make`` is None.

    Raises:
        UserError: if the hook changes the mixture, but ``--permutation`` does not allow mixture
            changes, or the mixture changes anyway.
    """
    hook = make(plan, layout) if make else TrainingHook()
    if hook.mixture_interval:
        online, reload = plan.options.online.online, plan.options.reload.reload_mixture
        name = f"--online {online}" if online else type(hook).__name__
        if reload is not None:
            name = f"--reload-mixture {reload}"
        if plan.options.data.permutation == "megatron":
            raise UserError(
                f"{name} changes the mixture, which requires --permutation epoch or feistel"
            )
        if plan.options.data.mixture_change:
            raise UserError(f"{name} changes the mixture; leave out --mixture-change")
        if plan.mixture.stages:
            raise UserError(
                f"{name} changes the mixture, but so does --mixture {plan.options.mixture}; select "
                "the weights of one step with convert_mixture --at-step"
            )
    return hook


def hook_name(hook: TrainingHook) -> str | None:
    """Name of the hook's class; None for the base class, which does nothing."""
    return None if type(hook) is TrainingHook else type(hook).__name__


def load_hook(hook: TrainingHook, checkpoint: CheckpointRecord | None) -> None:
    """Restore the hook's state from the checkpoint that the run resumes from, if any.

    Raises:
        UserError: if the checkpoint was written with another hook.
    """
    if checkpoint is None:
        return
    saved = checkpoint.hook
    before, now = saved.name if saved else None, hook_name(hook)
    if before != now:
        raise UserError(
            f"{checkpoint.root} was written by a run with {before or 'no training hook'}, but this "
            f"run has {now or 'no training hook'}; {FRESH_START}"
        )
    if saved:
        hook.load_state_dict(saved.state)


def copy_of_state(hook: TrainingHook) -> dict[str, Any]:
    """Copy the state of ``hook``.

    Raises:
        TypeError: if the state is not JSON-serializable.
        ValueError: if a number in it is not finite.
    """
    copy: dict[str, Any] = json.loads(json.dumps(hook.state_dict(), allow_nan=False))
    return copy


def save_hook(hook: TrainingHook) -> HookState | None:
    """Return the hook's state for a checkpoint; None without a hook. See :func:`copy_of_state`."""
    name = hook_name(hook)
    return HookState(name, copy_of_state(hook)) if name else None


class HookRunner:
    """Call a hook at each step, and compute the step's gradient with the hook's weights.

    Args:
        hook: the training hook. If it combines gradients, buffers for one gradient per domain, and
            for that of its target, are allocated here.
        passes: passes of the trained model, built with ``per_token_loss`` if the hook combines
            gradients.
        config: the trained model.
        layout: layout of the ranks.
    """

    def __init__(
        self, hook: TrainingHook, passes: Passes, config: ModelConfig, layout: Layout
    ) -> None:
        self._hook, self._passes, self._config, self._layout = hook, passes, config, layout
        # Trained chunks are wrapped for data parallelism.
        self._model: Sequence[DistributedDataParallel] = passes.model
        self._gradients: DomainGradients | None = None
        if hook.combines_gradients:
            count = passes.num_domains + int(hook.target_batch_size > 0)
            self._gradients = DomainGradients(self._model, count)
        self._acts_within_steps = (
            hook.combines_gradients or type(hook).loss_weights is not TrainingHook.loss_weights
        )
        self._before_step: dict[str, Any] = {}

    def change_mixture(self, step: int, samples: BlendedTokens, global_batch_size: int) -> bool:
        """Call ``new_mixture`` if it is due after ``step`` steps; return whether it was called.

        The new mixture starts with the next step, so a checkpoint before that step does not include
        it.
        """
        interval = self._hook.mixture_interval
        if not interval or not step or step % interval:
            return False
        weights = self._hook.new_mixture(step, self._passes.model)
        if weights is not None:
            samples.change_weights(step * global_batch_size, weights)
        return True

    def forward_backward(
        self, batches: Iterator[Batch], step: int, learning_rate: float
    ) -> torch.Tensor:
        """Run forward and backward passes over the next global batch, with the hook's weights.

        Args:
            batches: this rank's micro-batches.
            step: number of steps done before this step.
            learning_rate: learning rate of the upcoming update.
        """
        if not self._acts_within_steps:
            return self._passes.forward_backward(batches)
        self._before_step = copy_of_state(self._hook)
        micro_batches = list(itertools.islice(batches, self._passes.shape.num_microbatches))
        batch = GlobalBatch(
            step, micro_batches, self._passes, self._config, self._layout, self._hook
        )
        weights = self._hook.loss_weights(batch)
        if self._gradients is None:
            return self._passes.forward_backward(iter(micro_batches), loss_weights=weights)
        batch = self._with_target(batch)
        self._gradients.start_batch(batch.domain_tokens, learning_rate)
        return self._combine_gradients(batch, weights, self._gradients)

    def end_step(self, step: int, domain_losses: Array) -> None:
        """Pass the losses of the last step, which updated the model, to the hook.

        Args:
            step: number of steps done.
            domain_losses: [2, k] summed loss and number of tokens of each domain, over all ranks.
        """
        self._hook.end_step(step, *domain_losses)

    def undo_step(self) -> None:
        """Restore the hook's state from before the last step, which was skipped.

        A NaN loss or gradient of that step may have made the state NaN.
        """
        if self._acts_within_steps:
            self._hook.load_state_dict(self._before_step)

    def _with_target(self, batch: GlobalBatch) -> GlobalBatch:
        """Append this rank's samples of the hook's target to ``batch``, as one more domain."""
        size, layout, number = self._hook.target_batch_size, self._layout, batch.num_domains
        if not size:
            return batch
        first, device = batch.step * size, batch.micro_batches[0]["tokens"].device
        mine = range(first + layout.data_rank, first + size, layout.data_size)
        target: list[Batch] = []
        if mine:  # fewer samples than data-parallel ranks leave some ranks without one
            read = self._hook.target_batch(mine)
            read["domain"] = torch.full_like(read["domain"], number)
            target = [{name: to_device(part, device) for name, part in read.items()}]
        weights = self._passes.loss_weights
        if weights is not None:  # the target's losses have weight 1
            weights = torch.nn.functional.pad(weights, (0, 1), value=1.0)
        passes = dataclasses.replace(self._passes, num_domains=number + 1, loss_weights=weights)
        return dataclasses.replace(
            batch, micro_batches=[*batch.micro_batches, *target], passes=passes
        )

    def _combine_gradients(
        self, batch: GlobalBatch, loss_weights: torch.Tensor | None, gradients: DomainGradients
    ) -> torch.Tensor:
        """Compute the gradient of each domain, then their sum with the hook's weights."""
        # Indices of each domain's samples in the concatenated micro-batches.
        rows: list[list[int]] = [[] for _ in range(batch.num_domains)]
        domains = torch.cat([part["domain"] for part in batch.micro_batches])
        for row, domain in enumerate(domains.tolist()):  # tolist() synchronizes once
            rows[domain].append(row)
        stages = self._layout.pipeline_size
        by_domain = micro_batches_by_domain(
            batch.micro_batches,
            {domain: rows[domain] for domain in gradients.present},
            largest=self._passes.shape.micro_batch_size,
            pipeline=stages,
            rounds=stages if len(self._model) > 1 else 1,  # stages are interleaved
        )
        sums = torch.zeros(batch.num_domains, 3, dtype=torch.float64, device=self._passes.device)
        # Samples that are not in the global batch: padding and the target's.
        extra = torch.zeros(1, dtype=torch.int64, device=self._passes.device)
        num_domains = self._passes.num_domains
        for domain, own in by_domain.items():
            for chunk in self._model:
                chunk.zero_grad_buffer()
            sizes = [len(part["domain"]) for part in own]
            sums += batch.passes.forward_backward(iter(own), len(own), loss_weights, sizes[0])
            gradients.keep(domain)
            extra += sum(sizes) - (len(rows[domain]) if domain < num_domains else 0)
        gradients.combine(self._hook.gradient_weights(gradients))
        length = self._passes.shape.seq_length
        computed = int(sum_over_ranks(extra, self._layout)) * length
        self._hook.flops += training_flops(self._config, computed, length)
        if self._layout.is_last_stage:  # exclude padding samples from the sampled tokens
            sampled = torch.tensor([len(own) * length for own in rows])
            sums[:, 2] = to_device(sampled, self._passes.device)
        return sums[:num_domains]
