"""Memory of a run: estimate, hints after out-of-memory errors, and a dry first step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.checkpoint.state import random_states, set_random_states
from megatron_chameleon.errors import UserError
from megatron_chameleon.host_memory import require_host_memory
from megatron_chameleon.model.config import DEFAULT_MODEL, ModelConfig
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.huggingface_config import describe
from megatron_chameleon.model.memory import TrainingSetup, estimate_memory, peak_bytes_per_rank
from megatron_chameleon.model.options import resolve_model
from megatron_chameleon.parallel.layout import Layout, check_layout
from megatron_chameleon.training.optimizer import TrainedModel
from megatron_chameleon.training.options import EstimateMemoryOptions, ModelOptions
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.step import BatchShape

GB = 1e9
MEMORY_HINT = (
    "try --use-distributed-optimizer, a smaller --micro-batch-size, --recompute-granularity full, "
    "--bf16, or more ranks with a larger --tensor-model-parallel-size"
)

# Attributes of megatron's bucket groups that a step changes, and that dry_first_step restores. In
# its first batch, a bucket group counts the gradients that complete a bucket; the first two
# attributes belong to this count. The third one records whether parameters have been gathered.
BOOKKEEPING = ("is_first_batch", "golden_per_param_grad_ready_counts", "param_gather_dispatched")


def training_setup(options: ModelOptions, config: ModelConfig, world_size: int) -> TrainingSetup:
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
    )


def print_estimate(options: EstimateMemoryOptions) -> int:
    """Print a rank's peak memory; return exit status 1 if it exceeds the device memory, else 0.

    Raises:
        UserError: if the options do not describe a possible run.
    """
    config = resolve_model(
        options.model or DEFAULT_MODEL, options.architecture, options.vocab_size, options.seq_length
    )
    parallel = options.parallel
    check_layout(parallel, options.world_size)
    check_model_layout(config, parallel, options.seq_length)
    setup = training_setup(options, config, options.world_size)
    print(
        f"{describe(config)}\n"
        f"{options.world_size} rank(s): tensor {parallel.tensor_model_parallel_size}, "
        f"pipeline {parallel.pipeline_model_parallel_size}, data {setup.data_parallel_size}; "
        f"{setup.num_microbatches} micro-batch(es) of {options.micro_batch_size} x "
        f"{options.seq_length} tokens in {'bfloat16' if options.bf16 else 'float32'}\n"
        "peak memory of each rank"
    )
    stages = estimate_memory(setup)
    totals = [sum(stage.values()) for stage in stages]
    total = max(totals)
    fullest = totals.index(total)
    for name, size in [*stages[fullest].items(), ("total", total)]:
        print(f"  {name.replace('_', ' '):<14}{size / GB:10.2f} GB{size / total:7.0%}")
    others = [f"stage {n} {size / GB:.2f}" for n, size in enumerate(totals) if n != fullest]
    if others:
        print(f"pipeline stage {fullest} needs the most; other stages, in GB: {', '.join(others)}")
    if options.device_memory_gb is None:
        return 0
    left = options.device_memory_gb - total / GB
    if left > 0:
        verdict = f"fits in {options.device_memory_gb:g} GB: {left:.2f} GB are left for CUDA"
    else:
        verdict = f"does not fit in {options.device_memory_gb:g} GB: {-left:.2f} GB are missing"
        verdict += f"; {MEMORY_HINT}"
    print(verdict)
    return int(left <= 0)


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
            f"out of memory: {MEMORY_HINT}; megatron-chameleon estimate_memory prints the memory "
            "by component"
        ) from error


def check_host_memory(plan: TrainingPlan, layout: Layout) -> None:
    """Check that the host has enough memory for its ranks if they train on the CPU.

    Raises:
        UserError: if the machine is too small.
    """
    if layout.device.type != "cpu":
        return
    setup = training_setup(plan.options, plan.config, layout.world_size)
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
    accepts, states = optimizer.accepts, random_states()
    groups = [group for chunk in model.chunks for group in chunk.bucket_groups]
    bookkeeping = [{name: getattr(group, name) for name in BOOKKEEPING} for group in groups]
    parts = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
    with_moments = [set(part.optimizer.state) for part in parts]

    model.zero_gradients()
    for part in parts:  # allocates Adam's moments of the parameters that have none yet
        part.init_state_fn(part.optimizer, part.config)
    optimizer.accepts = lambda _grad_norm: False
    # Two rounds of micro-batches fill a pipeline of interleaved stages; one round fills any other
    # pipeline.
    count = layout.pipeline_size * (2 if len(model.chunks) > 1 else 1)
    count = min(count, model.passes.shape.num_microbatches)
    model.passes.forward_backward(_random_batches(plan, count), count)
    optimizer.step()

    optimizer.accepts = accepts
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
        text = torch.randint(
            plan.data.tokenizer.vocab_size, (rows, length + 1), generator=generator
        )
        tokens, labels = text[:, :-1], text[:, 1:]
        domain = torch.zeros(rows, dtype=torch.int64)
        yield {"tokens": tokens, "labels": labels, **plan.boundaries(tokens), "domain": domain}
