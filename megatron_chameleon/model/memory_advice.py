"""Which flags would make a run need less memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.memory import TrainingSetup, estimate_memory
from megatron_chameleon.model.recompute import KEEP_ALL
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.memory import EstimateMemoryOptions
from megatron_chameleon.options.recompute import RecomputeOptions
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.parallel.layout import Layout

GB = 1e9

Beside = Callable[[TrainingSetup, int], Mapping[str, int]]
"""Name -> bytes that each rank of a pipeline stage holds beside what training takes."""


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
    """What ``options`` ask for, on so many ranks."""
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
    # What is held beside the training is always told: no flag of the training is named after it.
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
    if parallel.recompute == KEEP_ALL:
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
