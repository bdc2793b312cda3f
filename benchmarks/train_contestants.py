"""Contestants of the training benchmark: optimizer steps of our model and of the plain model."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from benchmarks.plain_gpt import PlainGPT, plain_optimizer, plain_step
from megatron_chameleon.blend.prefetch import read_ahead
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.model.compiled_layers import compile_layers
from megatron_chameleon.model.gpt import build_model_chunks, unwrap
from megatron_chameleon.model.layers import SDPACoreAttention
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.optimizer import build_optimizer, build_scheduler, data_parallel
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.step import BatchShape, Passes, train_step

VOCAB_SIZE = 50_257  # of GPT-2's tokenizer


@dataclasses.dataclass(frozen=True)
class Case:
    """A model size and the steps to time."""

    size: str
    seq_length: int
    bf16: bool
    tokens_per_step: int

    @property
    def shape(self) -> ModelShape:
        """The shape of the model."""
        return ModelShape(model_size(self.size), VOCAB_SIZE, self.seq_length)

    def num_microbatches(self, micro_batch_size: int) -> int:
        """Micro-batches per step."""
        return max(1, self.tokens_per_step // (micro_batch_size * self.seq_length))

    def __str__(self) -> str:
        return f"{self.size}, sequence {self.seq_length}, {'bf16' if self.bf16 else 'fp32'}"


class Contestant(Protocol):
    """A model that can be trained with any micro-batch size."""

    def run(self, micro_batch_size: int, steps: int, each: Callable[[], object]) -> None:
        """Train for ``steps`` steps, and call ``each`` after each of them."""
        ...


def random_batches(case: Case, micro_batch_size: int) -> Iterator[Batch]:
    """Endless micro-batches of random tokens, without padding."""
    generator = torch.Generator().manual_seed(0)
    b, s = micro_batch_size, case.seq_length
    while True:
        text = torch.randint(VOCAB_SIZE, (b, s + 1), generator=generator)
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(b, s),
            "position_ids": torch.arange(s).repeat(b, 1),
            "domain": torch.zeros(b, dtype=torch.int64),
        }


class Ours:
    """Training as tools/pretrain_gpt.py does it, without logs and checkpoints."""

    def __init__(
        self,
        case: Case,
        layout: Layout,
        *,
        compiled: bool = False,
        head_dim_multiple: int | None = None,
    ) -> None:
        self._case, self._layout = case, layout
        chunks = build_model_chunks(case.shape, layout, seed=0, bf16=case.bf16)
        for module in unwrap(chunks[0]).modules():
            if isinstance(module, SDPACoreAttention) and head_dim_multiple:
                module.head_dim_multiple = head_dim_multiple
        if compiled:
            compile_layers(unwrap(chunks[0]))
        self._chunks = data_parallel(chunks, layout, bf16=case.bf16)
        options = OptimizerOptions(lr=1e-4, min_lr=1e-5, lr_warmup_iters=0)
        self._optimizer = build_optimizer(self._chunks, options, layout, bf16=case.bf16)
        self._scheduler = build_scheduler(self._optimizer, options, train_iters=10**6)

    def run(self, micro_batch_size: int, steps: int, each: Callable[[], object]) -> None:
        """See :class:`Contestant`."""
        case = self._case
        count = case.num_microbatches(micro_batch_size)
        shape = BatchShape(count, micro_batch_size, case.seq_length)
        passes = Passes(self._chunks, shape, num_domains=1)
        with read_ahead(random_batches(case, micro_batch_size), self._layout.device) as batches:
            for _ in range(steps):
                result = train_step(
                    self._chunks,
                    self._optimizer,
                    self._scheduler,
                    lambda: passes.forward_backward(batches),
                )
                assert math.isfinite(result.grad_norm)
                each()


class Plain:
    """The plain model, on the same batches."""

    def __init__(self, case: Case, layout: Layout, *, compiled: bool = False) -> None:
        self._case, self._layout = case, layout
        torch.manual_seed(0)
        self._model = PlainGPT(case.shape).to(layout.device)
        self._optimizer = plain_optimizer(self._model)
        # The emulated CUDA device of the tests disables compiling.
        self._stance: Any = "default" if compiled else "force_eager"
        if compiled:
            self._model.compile_regions()

    def run(self, micro_batch_size: int, steps: int, each: Callable[[], object]) -> None:
        """See :class:`Contestant`."""
        case = self._case
        count = case.num_microbatches(micro_batch_size)
        with read_ahead(random_batches(case, micro_batch_size), self._layout.device) as batches:
            for _ in range(steps):
                taken = itertools.islice(batches, count)
                with torch.compiler.set_stance(self._stance):
                    plain_step(self._model, self._optimizer, list(taken), bf16=case.bf16)
                each()
