"""Optimizer steps of a real model on random tokens, without a corpus, logs or checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_chameleon.blend.boundaries import document_starts
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.model.compiled_layers import compile_layers
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.gpt import build_model_chunks, unwrap
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.optimizer import (
    TrainedModel,
    build_optimizer,
    build_scheduler,
    data_parallel,
)
from megatron_chameleon.training.options import DocumentAttention, OptimizerOptions
from megatron_chameleon.training.step import BatchShape, Passes, StepResult

OPTIMIZER = OptimizerOptions(lr=1e-4, min_lr=1e-5, lr_warmup_iters=0)


def random_batches(
    vocab_size: int, rows: int, length: int, num_domains: int = 1, document_length: int = 0
) -> Iterator[Batch]:
    """Yield random micro-batches [rows, length] endlessly; samples cycle through the domains.

    With ``document_length``, the mean number of tokens of a document, documents are separated.
    """
    generator = torch.Generator().manual_seed(0)
    first = 0
    while True:
        text = torch.randint(vocab_size, (rows, length + 1), generator=generator)
        batch = {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(rows, length),
            "position_ids": torch.arange(length).repeat(rows, 1),
            "domain": torch.arange(first, first + rows) % num_domains,
        }
        if document_length:
            ends = torch.rand(rows, length, generator=generator) < 1 / document_length
            batch["document_starts"] = document_starts(ends)
        yield batch
        first += rows


class RandomTraining:
    """Build a model with its optimizer and scheduler.

    Args:
        shape: shape of the model.
        layout: parallel layout of the ranks.
        bf16: train in bfloat16 with main weights in float32.
        compiled: backend of torch.compile for the layers; None trains eagerly.
        optimizer: the optimizer's options.
        train_iters: steps of the learning-rate schedule.
        model: further arguments of build_model_chunks.
    """

    def __init__(
        self,
        shape: ModelConfig,
        layout: Layout,
        *,
        bf16: bool,
        compiled: Any = None,
        optimizer: OptimizerOptions = OPTIMIZER,
        train_iters: int = 10**6,
        **model: Any,
    ) -> None:
        self.shape, self.layout = shape, layout
        chunks = build_model_chunks(shape, layout, seed=0, bf16=bf16, **model)
        if compiled is not None:
            for chunk in chunks:
                compile_layers(unwrap(chunk), backend=compiled)
        self.chunks = data_parallel(chunks, layout, bf16=bf16)
        self.optimizer = build_optimizer(self.chunks, optimizer, layout, bf16=bf16)
        scheduler = build_scheduler(self.optimizer, optimizer, train_iters)
        self.model = TrainedModel(self.chunks, self.optimizer, scheduler, self.passes(1, 1))

    def passes(
        self,
        num_microbatches: int,
        rows: int,
        num_domains: int = 1,
        length: int = 0,
        document_attention: DocumentAttention = "dense",
    ) -> Passes:
        """Run the forward and backward passes of one step on this rank.

        Sequences have ``length`` tokens, or by default the maximum of the model.
        """
        shape = BatchShape(num_microbatches, rows, length or self.shape.max_sequence_length)
        return Passes(self.chunks, shape, num_domains, document_attention=document_attention)

    def step(self, forward_backward: Callable[[], torch.Tensor]) -> StepResult:
        """Take one optimizer step, and assert that the gradient norm is finite."""
        return train_step(self.model, forward_backward)


def train_step(model: TrainedModel, forward_backward: Callable[[], torch.Tensor]) -> StepResult:
    """Take one optimizer step as the trainer does, and assert that the gradient norm is finite."""
    model.zero_gradients()
    model.scheduler.step(1)
    domain_sums = forward_backward()
    model.optimizer.prepare_grads()
    grad_norm = model.optimizer.get_grad_norm()
    assert math.isfinite(grad_norm)
    model.clip_gradients(grad_norm)
    model.optimizer.step_with_ready_grads()
    return StepResult(domain_sums, grad_norm)
