"""Memory of a run: estimate, hints against running out of it, and a dry first step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_chameleon.blend.boundaries import DocumentBoundaries
from megatron_chameleon.blend.sampler import Batch, check_batch_sizes
from megatron_chameleon.checkpoint.state import random_states, set_random_states
from megatron_chameleon.errors import UserError
from megatron_chameleon.host_memory import require_host_memory
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.memory import (
    RankMemory,
    TrainingSetup,
    chunks_in_flight,
    estimate_memory,
    fullest_stage,
)
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.parallel.layout import Layout, check_layout
from megatron_chameleon.parallel.options import RecomputeOptions
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.optimizer import GuardedOptimizer, TrainedModel
from megatron_chameleon.training.options import DryFirstStep, EstimateMemoryOptions, PretrainOptions
from megatron_chameleon.training.plan import TrainingPlan

GB = 1e9

Beside = Callable[[TrainingSetup, int], Mapping[str, int]]
"""Name -> bytes that each rank of a pipeline stage holds beside what training takes."""

DOES_NOT_FIT = 1

# Of megatron's bucket groups.
BOOKKEEPING = ("is_first_batch", "golden_per_param_grad_ready_counts", "param_gather_dispatched")


def nothing_beside(_setup: TrainingSetup, _stage: int) -> dict[str, int]:
    """Of a run that is trained, and no more."""
    return {}


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change of one flag, and what the fullest rank would hold with it, in bytes."""

    flag: str
    total: int


def training_setup(
    options: PretrainOptions | EstimateMemoryOptions, shape: ModelShape, world_size: int
) -> TrainingSetup:
    """The training setup of ``options`` on ``world_size`` ranks."""
    parallel = options.parallel
    model_parallel = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    data = world_size // model_parallel
    return TrainingSetup(
        shape=shape,
        parallel=parallel,
        data_parallel_size=data,
        micro_batch_size=options.micro_batch_size,
        num_microbatches=options.global_batch_size // (options.micro_batch_size * data),
        bf16=options.bf16,
    )


def describe_out_of_memory(
    options: PretrainOptions,
    shape: ModelShape,
    layout: Layout,
    beside: Beside = nothing_beside,
) -> str:
    """One line for a run that has run out of memory: what takes it, and two flags to change."""
    setup = training_setup(options, shape, layout.world_size)
    stage, held = _fullest(setup, beside)
    largest = sorted(held.items(), key=lambda part: -part[1])[:3]
    # Always list the memory of hooks, which no training flag reduces.
    told = dict(largest) | {name: held[name] for name in beside(setup, stage)}
    parts = ", ".join(f"{name} {size / GB:.1f}".replace("_", " ") for name, size in told.items())
    return (
        f"out of memory: a rank of pipeline stage {stage} needs about "
        f"{sum(held.values()) / GB:.1f} GB ({parts}) and what CUDA takes; "
        f"{remedies_line(setup, beside=beside)}"
    )


def _fullest(setup: TrainingSetup, beside: Beside) -> tuple[int, dict[str, int]]:
    """The stage that needs most, and what its ranks hold: name -> bytes."""
    stages = {
        memory.stage: memory.parts | dict(beside(setup, memory.stage))
        for memory in estimate_memory(setup)
    }
    return max(stages.items(), key=lambda stage: sum(stage[1].values()))


def _total(setup: TrainingSetup, beside: Beside) -> int:
    return sum(_fullest(setup, beside)[1].values())


def remedies_line(
    setup: TrainingSetup, device_bytes: float | None = None, beside: Beside = nothing_beside
) -> str:
    """The two flags most likely to help, with the estimates they give."""
    remedies = find_remedies(setup, device_bytes, beside)[:2]
    if not remedies:
        return "no flag is left to change: take a smaller model, a shorter --seq-length, more ranks"
    told = " or ".join(f"{remedy.flag} ({remedy.total / GB:.1f} GB)" for remedy in remedies)
    return f"most likely to fix it: {told}"


def find_remedies(
    setup: TrainingSetup, device_bytes: float | None = None, beside: Beside = nothing_beside
) -> list[Remedy]:
    """Changes of one flag that save memory on these ranks, best first.

    Where the size of a device is known, those that fit come first in the order of what they cost
    in speed; the others, and all where it is not, by what they leave.
    """
    now = _total(setup, beside)
    found = [Remedy(flag, _total(other, beside)) for flag, other in _changes(setup)]
    saving = [remedy for remedy in found if remedy.total < now]
    limit = device_bytes or 0
    cheapest_first = [remedy for remedy in saving if remedy.total <= limit]
    others = sorted((r for r in saving if r.total > limit), key=lambda remedy: remedy.total)
    return cheapest_first + others


def _changes(setup: TrainingSetup) -> Iterator[tuple[str, TrainingSetup]]:
    """Flag -> the run with it, those first that cost least speed; only what can be run."""
    parallel = setup.parallel
    tensor = parallel.tensor_model_parallel_size
    if setup.data_parallel_size > 1 and not parallel.use_distributed_optimizer:
        yield "--use-distributed-optimizer", _with(setup, use_distributed_optimizer=True)
    if tensor > 1 and not parallel.sequence_parallel:
        yield "--sequence-parallel", _with(setup, sequence_parallel=True)
    if setup.micro_batch_size % 2 == 0:
        yield (
            f"--micro-batch-size {setup.micro_batch_size // 2}",
            dataclasses.replace(
                setup,
                micro_batch_size=setup.micro_batch_size // 2,
                num_microbatches=setup.num_microbatches * 2,
            ),
        )
    if not setup.bf16:
        yield "--bf16", dataclasses.replace(setup, bf16=True)
    if parallel.recompute == RecomputeOptions():
        full = RecomputeOptions(recompute_granularity="full")
        yield "--recompute-granularity full", _with(setup, recompute=full)
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        degree = getattr(parallel, name)
        larger = next(_larger_degrees(setup, name, degree), None)
        if larger is not None:
            yield f"--{name.replace('_', '-')} {getattr(larger.parallel, name)}", larger


def _larger_degrees(setup: TrainingSetup, name: str, degree: int) -> Iterator[TrainingSetup]:
    """The same ranks with more of them for one model, nearest degree first."""
    ranks = setup.data_parallel_size * degree
    sequences = setup.micro_batch_size * setup.num_microbatches * setup.data_parallel_size
    for larger in range(degree + 1, ranks + 1):
        other = _with(setup, **{name: larger})
        data = ranks // larger
        unit = setup.micro_batch_size * data
        if ranks % larger or sequences % unit or not _can_be_cut(other):
            continue
        yield dataclasses.replace(
            other, data_parallel_size=data, num_microbatches=sequences // unit
        )


def _can_be_cut(setup: TrainingSetup) -> bool:
    try:
        check_model_layout(setup.shape.size, setup.parallel, setup.shape.max_sequence_length)
    except UserError:
        return False
    return True


def _with(setup: TrainingSetup, **changes: Any) -> TrainingSetup:
    return dataclasses.replace(setup, parallel=dataclasses.replace(setup.parallel, **changes))


def print_estimate(options: EstimateMemoryOptions) -> int:
    """Print what each rank would hold. Returns the exit status: 1 if it is too much.

    Raises:
        UserError: for a run that could not be started.
    """
    shape = ModelShape(model_size(options.model_size), options.vocab_size, options.seq_length)
    setup = checked_setup(options, shape)
    parallel = options.parallel
    print(
        f"{options.model_size}: {shape.num_parameters:,} parameters on {options.world_size} "
        f"rank(s): tensor {parallel.tensor_model_parallel_size}, "
        f"pipeline {parallel.pipeline_model_parallel_size}, data {setup.data_parallel_size}; "
        f"{setup.num_microbatches} micro-batch(es) of {options.micro_batch_size} x "
        f"{options.seq_length} tokens in {'bfloat16' if options.bf16 else 'float32'}\n"
        f"at its peak, each rank holds\n{memory_table(setup)}"
    )
    if options.device_memory_gb is None:
        return 0
    line, status = verdict(setup, options.device_memory_gb)
    print(line)
    return status


def checked_setup(options: EstimateMemoryOptions, shape: ModelShape) -> TrainingSetup:
    """The run that is asked for. Raises UserError for one that could not be started."""
    for field in ("vocab_size", "seq_length", "world_size"):
        value = getattr(options, field)
        if value < 1:
            raise UserError(f"--{field.replace('_', '-')} {value}: give a whole number from 1 on")
    if options.device_memory_gb is not None and not options.device_memory_gb > 0:
        raise UserError(f"--device-memory-gb {options.device_memory_gb}: give a number above 0")
    check_layout(options.parallel, options.world_size)
    check_model_layout(shape.size, options.parallel, options.seq_length)
    parallel = options.parallel
    data = options.world_size // (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    )
    check_batch_sizes(options.global_batch_size, options.micro_batch_size, data)
    setup = training_setup(options, shape, options.world_size)
    parallel.check_microbatches(setup.num_microbatches)
    return setup


def memory_table(setup: TrainingSetup) -> str:
    """The fullest stage line by line, then the totals of the others."""
    stages = estimate_memory(setup)
    fullest = max(stages, key=lambda memory: memory.total)
    lines = [_row(name, size, fullest) for name, size in fullest.parts.items()]
    lines.append(_row("total", fullest.total, fullest))
    others = [f"stage {m.stage} {m.total / GB:.2f}" for m in stages if m is not fullest]
    if others:
        lines.append(f"that is stage {fullest.stage}, the fullest; in GB: {', '.join(others)}")
    return "\n".join(lines)


def verdict(setup: TrainingSetup, device_memory_gb: float) -> tuple[str, int]:
    """Whether it fits, with what would make it fit; and the exit status that says so."""
    left = device_memory_gb - fullest_stage(setup).total / GB
    if left > 0:
        return f"fits in {device_memory_gb:g} GB: {left:.2f} GB are left, for CUDA too", 0
    missing = f"does not fit in {device_memory_gb:g} GB: {-left:.2f} GB are missing"
    return f"{missing}; {remedies_line(setup, device_memory_gb * GB)}", DOES_NOT_FIT


def _row(name: str, size: int, memory: RankMemory) -> str:
    return f"  {name.replace('_', ' '):<14}{size / GB:10.2f} GB{size / memory.total:7.0%}"


def wants_dry_step(choice: DryFirstStep, device: torch.device) -> bool:
    """Whether a run on ``device`` begins with a dry step."""
    return choice == "on" or (choice == "auto" and device.type == "cuda")


@contextlib.contextmanager
def explain_out_of_memory(
    plan: TrainingPlan, layout: Layout, hook: TrainingHook | None = None
) -> Iterator[None]:
    """Turn an out-of-memory error within the block into a UserError with hints.

    Args:
        plan: plan of the run.
        layout: layout of the ranks.
        hook: training hook, which may hold memory too.

    Raises:
        UserError: with the two flags most likely to help, on the rank that ran out.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:

        def beside(setup: TrainingSetup, stage: int) -> dict[str, int]:
            return hook.extra_bytes(setup, stage, len(plan.data.names)) if hook else {}

        advice = describe_out_of_memory(plan.options, plan.shape, layout, beside)
        raise UserError(advice) from error


def check_host_memory(plan: TrainingPlan, layout: Layout) -> None:
    """Check that the host can hold what its ranks take, where they train on the CPU.

    Raises:
        UserError: if the machine is too small, with the two flags most likely to help.
    """
    if layout.device.type != "cpu":
        return
    setup = training_setup(plan.options, plan.shape, layout.world_size)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    require_host_memory(
        ranks * fullest_stage(setup).total,
        f"training on {ranks} rank(s) of this machine",
        remedies_line(setup),
    )


def dry_first_step(plan: TrainingPlan, layout: Layout, model: TrainedModel) -> None:
    """Run one step without an update, to allocate its peak memory. Every rank calls this.

    Weights, gradients, optimizer, schedule and random states are unchanged afterwards. The hook's
    memory is already allocated; its own forward passes need less and are not run.

    Raises:
        torch.OutOfMemoryError: if the device memory does not suffice.
    """
    setup = training_setup(plan.options, plan.shape, layout.world_size)
    count = microbatches_to_peak(setup)
    with (
        _same_random_states(),
        _clean_gradients(model.chunks, model.optimizer),
        _moments(model.optimizer),
        _no_update(model.optimizer),
    ):
        model.passes.forward_backward(_random_batches(plan, count), count)
        model.optimizer.step()


def microbatches_to_peak(setup: TrainingSetup) -> int:
    """The fewest micro-batches whose passes hold as much as those of a whole step."""
    parallel = setup.parallel
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    # The first stage has most chunks in flight. Interleaved stages take whole rounds.
    needed = -(-chunks_in_flight(setup, stage=0) // virtual)
    rounds = parallel.pipeline_model_parallel_size if virtual > 1 else 1
    return min(-(-needed // rounds) * rounds, setup.num_microbatches)


def _random_batches(plan: TrainingPlan, count: int) -> Iterator[Batch]:
    """Micro-batches of the shapes that the run will read, the same on every rank."""
    options = plan.options
    boundaries = DocumentBoundaries(plan.data.tokenizer.eod_id, options.boundaries)
    generator = torch.Generator().manual_seed(options.seed)
    rows, length = options.micro_batch_size, options.seq_length
    for _ in range(count):
        text = torch.randint(
            plan.data.tokenizer.vocab_size, (rows, length + 1), generator=generator
        )
        tokens, labels = text[:, :-1], text[:, 1:]
        domain = torch.zeros(rows, dtype=torch.int64)
        yield {"tokens": tokens, "labels": labels, **boundaries(tokens), "domain": domain}


# These put things back where the block ends well. Where it does not, the run ends, and with half of
# the gradients under way there is nothing to go back to.
@contextlib.contextmanager
def _same_random_states() -> Iterator[None]:
    states = random_states()
    yield
    set_random_states(states)


@contextlib.contextmanager
def _clean_gradients(
    chunks: Sequence[DistributedDataParallel], optimizer: GuardedOptimizer
) -> Iterator[None]:
    """Begin and end without gradients, and with megatron's bookkeeping of them as it was.

    In its first batch a bucket learns how many gradients make it complete, and from the next one on
    it is sent when it is. Before each step it is noted whether parameters have been gathered.
    """
    groups = [group for chunk in chunks for group in chunk.bucket_groups]
    before = [{name: getattr(group, name) for name in BOOKKEEPING} for group in groups]
    _zero_gradients(chunks, optimizer)
    yield
    _zero_gradients(chunks, optimizer)
    for group, values in zip(groups, before, strict=True):
        vars(group).update(values)


def _zero_gradients(chunks: Sequence[DistributedDataParallel], optimizer: GuardedOptimizer) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


@contextlib.contextmanager
def _moments(optimizer: GuardedOptimizer) -> Iterator[None]:
    """Adam's moments of the parameters that have none yet, made by megatron, for the block."""
    parts = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
    before = [set(part.optimizer.state) for part in parts]
    for part in parts:
        part.init_state_fn(part.optimizer, part.config)
    yield
    for part, had in zip(parts, before, strict=True):
        for parameter in set(part.optimizer.state) - had:
            del part.optimizer.state[parameter]


@contextlib.contextmanager
def _no_update(optimizer: GuardedOptimizer) -> Iterator[None]:
    """The optimizer goes as far as it does in a step that is skipped."""
    accepts = optimizer.accepts
    optimizer.accepts = lambda _grad_norm: False
    yield
    optimizer.accepts = accepts
