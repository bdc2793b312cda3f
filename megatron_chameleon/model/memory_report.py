"""The estimate of a run's memory as a table that a person can read."""

from __future__ import annotations

from megatron_chameleon.blend.sampler import check_batch_sizes
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.memory import (
    RankMemory,
    TrainingSetup,
    estimate_memory,
    fullest_stage,
)
from megatron_chameleon.model.memory_advice import GB, remedies_line, training_setup
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.options.memory import EstimateMemoryOptions
from megatron_chameleon.parallel.layout import check_interleaving, check_layout

DOES_NOT_FIT = 1


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
    check_interleaving(parallel, setup.num_microbatches)
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
