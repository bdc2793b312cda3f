"""Options that several methods share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.ranges import (
    BatchSize,
    CheckedOptions,
    Count,
    LargeCount,
    Positive,
    Seed,
    flag_of,
)
from megatron_chameleon.training.options import (
    CheckpointingOptions,
    DryFirstStep,
    GuardOptions,
    LoggingOptions,
    OptimizerOptions,
    StoppingOptions,
    ValidationOptions,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodOptions(CheckedOptions):
    """Options of every method: the corpus, the mixture file, and the training to come."""

    corpus: Path
    """Folder written by tools/preprocess_data.py."""
    output: Path
    """The mixture.json to write."""
    token_budget: LargeCount | None = None
    """Tokens of the training to come, for which the epochs of each domain are printed and
    stored."""
    max_epochs: Positive | None = None
    """Maximum epochs of each domain's training tokens within --token-budget. The mixture is the
    nearest one within this limit (smallest Kullback-Leibler divergence)."""

    def __post_init__(self) -> None:
        """Raise UserError for an epoch limit without a token budget."""
        super().__post_init__()
        if self.max_epochs is not None and self.token_budget is None:
            raise UserError("--max-epochs requires --token-budget; add it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenDomainsOptions(MethodOptions):
    """Options of a method that can weigh a subset of the corpus's domains."""

    domains: str | None = None
    """Domains to weigh, a,b,c; the others get weight 0. All of them by default."""


@dataclasses.dataclass(frozen=True)
class ProxyOptions(CheckedOptions):
    """Training of a proxy, as by tools/pretrain_gpt.py: random initial weights, uniform mixture."""

    model_size: str = "82m"
    """Model size of the proxy; an unknown name lists them all."""
    train_iters: Count = 2000
    """Optimizer steps of each model to train (paper: 2000; DoReMi and DoGE: 10000)."""
    seq_length: Count = 1024
    """Tokens per sample (the paper's cost figures imply 1024)."""
    global_batch_size: BatchSize = 128
    """Sequences per step, over all ranks (paper: 128)."""
    micro_batch_size: BatchSize = 8
    """Sequences per forward pass and rank."""
    seed: Seed = 1234
    """Seed of the initial weights and of the sample order, for all models to train."""
    bf16: bool = False
    """Compute in bfloat16, with fp32 main weights and gradient accumulation."""
    compile_layers: bool = False
    """Compile the transformer layers with torch.compile, on a GPU: the first step takes about a
    minute longer, later ones are faster. Losses change by rounding alone."""
    deterministic: bool = False
    """Use only deterministic algorithms, also on a GPU, where some are slower; on the CPU all
    are."""
    dry_first_step: DryFirstStep = "auto"
    """Allocate the memory of a step before the first one, on random tokens and without side
    effects, so that a run that does not fit fails at once; 'auto' does so on a GPU."""
    log_interval: Count = 10
    """Steps between log lines and metrics."""
    save_interval: Count = 500
    """Steps between checkpoints; the last step always writes one."""
    boundaries: DocumentBoundaryOptions = dataclasses.field(default_factory=DocumentBoundaryOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    checkpointing: CheckpointingOptions = dataclasses.field(default_factory=CheckpointingOptions)
    guards: GuardOptions = dataclasses.field(default_factory=GuardOptions)
    stopping: StoppingOptions = dataclasses.field(default_factory=StoppingOptions)
    validation: ValidationOptions = dataclasses.field(default_factory=ValidationOptions)
    logging: LoggingOptions = dataclasses.field(default_factory=LoggingOptions)
    parallel: TrainingParallelOptions = dataclasses.field(default_factory=TrainingParallelOptions)


def changed_flags(options: Any, default: Any) -> Iterator[tuple[str, object]]:
    """Flag and value of each option that differs from ``default``, in nested groups, too.

    Args:
        options: an options dataclass.
        default: an instance of the same type.
    """
    for field in dataclasses.fields(options):
        value, usual = getattr(options, field.name), getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            yield from changed_flags(value, usual)
        elif value != usual:
            yield flag_of(field.name), value
