"""Out of memory: found in a dry first step or on the host before training, and explained."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from megatron_chameleon.blend.boundaries import document_boundaries
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.checkpoint.state import random_states, set_random_states
from megatron_chameleon.errors import UserError
from megatron_chameleon.host_memory import require_host_memory
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.memory import TrainingSetup, peak_bytes_per_rank
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.optimizer import TrainedModel
from megatron_chameleon.training.options import ModelOptions, TrainingOptions
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.step import BatchShape

MEMORY_HINT = (
    "try --use-distributed-optimizer, a smaller --micro-batch-size, --recompute-granularity full, "
    "--bf16, or more ranks with a larger --tensor-model-parallel-size"
)

# Attributes of megatron's bucket groups that a step changes, and that dry_first_step restores. In
# its first batch, a bucket group counts the gradients that complete a bucket; the first two
# attributes belong to this count. The third one records whether parameters have been gathered.
BOOKKEEPING = ("is_first_batch", "golden_per_param_grad_ready_counts", "param_gather_dispatched")


def training_setup(
    options: ModelOptions, config: ModelConfig, world_size: int, *, on_cpu: bool = False
) -> TrainingSetup:
    """Describe training with ``options`` on ``world_size`` ranks, to estimate its memory.

    Raises:
        UserError: if the global batch does not fit the ranks.
    """
    parallel = options.parallel
    model_parallel = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    data_parallel_size = world_size // model_parallel
    return TrainingSetup(
        config=config,
        parallel=parallel,
        data_parallel_size=data_parallel_size,
        micro_batch_size=options.micro_batch_size,
        num_microbatches=BatchShape.of(options, data_parallel_size).num_microbatches,
        bf16=options.bf16,
        seq_length=options.seq_length,
        hidden_dropout=options.hidden_dropout,
        attention_dropout=options.attention_dropout,
        on_cpu=on_cpu,
        muon=isinstance(options, TrainingOptions) and options.optimizer.optimizer == "muon",
    )


@contextlib.contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Convert an out-of-memory error of torch within the block to a UserError with a hint.

    Raises:
        UserError: on the rank that ran out of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"out of memory: {MEMORY_HINT}; megatron-chameleon plan_run prints the memory "
            "by component"
        ) from error


def check_host_memory(plan: TrainingPlan, layout: Layout) -> None:
    """Check that the host has enough memory for its ranks if they train on the CPU.

    Raises:
        UserError: if the machine is too small.
    """
    if layout.device.type != "cpu":
        return
    setup = training_setup(plan.options, plan.config, layout.world_size, on_cpu=True)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    require_host_memory(
        ranks * peak_bytes_per_rank(setup),
        f"training on {ranks} rank(s) of this machine",
        MEMORY_HINT,
    )


def dry_first_step(plan: TrainingPlan, layout: Layout, model: TrainedModel) -> None:
    """Run one step without an update, to allocate the peak memory of a step. Collective.

    Afterwards, weights, gradients, optimizer, schedule and random states are as before. If an error
    is raised, they are not restored, since the error ends the run. The hook has already allocated
    its memory. The hook's forward passes are not run, since they need less memory than a step.

    Raises:
        torch.OutOfMemoryError: if the device memory does not suffice.
    """
    optimizer = model.optimizer
    states = random_states()
    groups = [group for chunk in model.chunks for group in chunk.bucket_groups]
    bookkeeping = [{name: getattr(group, name) for name in BOOKKEEPING} for group in groups]
    parts = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
    with_moments = [set(part.optimizer.state) for part in parts]

    model.zero_gradients()
    for part in parts:  # allocates Adam's moments of the parameters that have none yet
        part.init_state_fn(part.optimizer, part.config)
    # Two rounds of micro-batches fill a pipeline of interleaved stages; one round fills any other
    # pipeline.
    count = layout.pipeline_size * (2 if len(model.chunks) > 1 else 1)
    count = min(count, model.passes.shape.num_microbatches)
    model.passes.forward_backward(_random_batches(plan, count), count)
    optimizer.prepare_grads()
    model.clip_gradients(optimizer.get_grad_norm())

    for part, had in zip(parts, with_moments, strict=True):
        for parameter in set(part.optimizer.state) - had:
            del part.optimizer.state[parameter]
    model.zero_gradients()
    for group, values in zip(groups, bookkeeping, strict=True):
        vars(group).update(values)
    set_random_states(states)


def _random_batches(plan: TrainingPlan, count: int) -> Iterator[Batch]:
    """Random micro-batches of the run's shapes, identical on every rank."""
    options = plan.options
    generator = torch.Generator().manual_seed(options.seed)
    rows, length = options.micro_batch_size, options.seq_length
    for _ in range(count):
        text = torch.randint(plan.config.vocab_size, (rows, length + 1), generator=generator)
        tokens, labels = text[:, :-1], text[:, 1:]
        domain = torch.zeros(rows, dtype=torch.int64)
        made = document_boundaries(tokens, plan.data.tokenizer.eod_id, options.boundaries)
        yield {"tokens": tokens, "labels": labels, **made, "domain": domain}
