"""How a method trains a proxy."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.options.checkpointing import CheckpointingOptions
from megatron_chameleon.options.guards import GuardOptions
from megatron_chameleon.options.logging import LoggingOptions
from megatron_chameleon.options.parallel import TrainingParallelOptions
from megatron_chameleon.options.ranges import BatchSize, Count, Seed
from megatron_chameleon.options.stopping import StoppingOptions
from megatron_chameleon.options.training import (
    DocumentBoundaryOptions,
    DryFirstStep,
    OptimizerOptions,
)
from megatron_chameleon.options.validation import ValidationOptions


@dataclasses.dataclass(frozen=True)
class ProxyOptions:
    """How a proxy is trained, as by tools/pretrain_gpt.py: from random weights, by uniform ones."""

    model_size: str = "82m"
    """Name of the proxy's model size; a wrong one lists them all."""
    train_iters: Count = 2000
    """Optimizer steps of each model that is trained (paper: 2000; DoReMi and DoGE: 10000)."""
    seq_length: Count = 1024
    """Tokens per sample (the paper's cost figures imply 1024)."""
    global_batch_size: BatchSize = 128
    """Sequences per step, over all ranks (paper: 128)."""
    micro_batch_size: BatchSize = 8
    """Sequences per forward pass and rank."""
    seed: Seed = 1234
    """Of the initial weights and of the order of samples, for all that is trained."""
    bf16: bool = False
    """Compute in bfloat16, with fp32 main weights and gradient accumulation."""
    compile_layers: bool = False
    """Compile the transformer layers with torch.compile, on a GPU: the first step takes about a
    minute longer and later ones are shorter. Losses change by rounding alone."""
    deterministic: bool = False
    """Use only algorithms that give the same bits every time, also on a GPU, where some are slower;
    on the CPU all are such."""
    dry_first_step: DryFirstStep = "auto"
    """Before the first step, take the memory that a step takes, on random tokens and without a
    trace, so that a run that is too large ends at once; auto does where there is a GPU."""
    log_interval: Count = 10
    """Steps between two lines of log and metrics."""
    save_interval: Count = 500
    """Steps between two checkpoints; the last step always writes one."""
    boundaries: DocumentBoundaryOptions = dataclasses.field(default_factory=DocumentBoundaryOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    checkpointing: CheckpointingOptions = dataclasses.field(default_factory=CheckpointingOptions)
    guards: GuardOptions = dataclasses.field(default_factory=GuardOptions)
    stopping: StoppingOptions = dataclasses.field(default_factory=StoppingOptions)
    validation: ValidationOptions = dataclasses.field(default_factory=ValidationOptions)
    logging: LoggingOptions = dataclasses.field(default_factory=LoggingOptions)
    parallel: TrainingParallelOptions = dataclasses.field(default_factory=TrainingParallelOptions)
