"""Options of tools/pretrain_gpt.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from megatron_chameleon.options.checkpointing import CheckpointingOptions
from megatron_chameleon.options.data import DataOptions
from megatron_chameleon.options.guards import GuardOptions
from megatron_chameleon.options.logging import LoggingOptions
from megatron_chameleon.options.online import OnlineOptions
from megatron_chameleon.options.parallel import TrainingParallelOptions
from megatron_chameleon.options.profiling import ProfilingOptions
from megatron_chameleon.options.ranges import (
    BatchSize,
    BelowOne,
    Count,
    NonNegative,
    Positive,
    Seed,
)
from megatron_chameleon.options.stopping import StoppingOptions
from megatron_chameleon.options.validation import ValidationOptions

DryFirstStep = Literal["auto", "on", "off"]


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """AdamW with linear warm-up and cosine decay."""

    lr: Positive = 5e-4
    """Peak learning rate (paper, proxies: 5e-4; 684M and 1.2B: 1.5e-4)."""
    min_lr: NonNegative = 1e-4
    """Learning rate at the end of the cosine (paper, proxies: 1e-4; 684M and 1.2B: 5e-5)."""
    lr_warmup_iters: int = 500
    """Steps of linear warm-up (assumed: the paper does not say)."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, on matrices only (paper)."""
    adam_beta1: BelowOne = 0.9
    """First-moment decay (assumed)."""
    adam_beta2: BelowOne = 0.95
    """Second-moment decay (assumed)."""
    adam_eps: NonNegative = 1e-8
    """Added to the denominator of the update."""
    clip_grad: NonNegative = 1.0
    """Largest global gradient norm; 0 clips nothing (paper: 1.0)."""


@dataclasses.dataclass(frozen=True)
class DocumentBoundaryOptions:
    """What the end of a document does within a sample that holds several."""

    reset_position_ids: bool = False
    """Count positions from 0 again after every end-of-document token."""
    reset_attention_mask: bool = False
    """Let no token attend to the documents before its own; needs a mask per sample, so slower."""
    eod_mask_loss: bool = False
    """Leave out of the loss what is predicted from an end-of-document token, a text's beginning."""


@dataclasses.dataclass(frozen=True)
class PretrainOptions:
    """Train a GPT on a corpus with a mixture of its domains.

    Run the same command again to continue a run that was interrupted.
    """

    run_dir: Path
    """Folder of this run: run.json, metrics.jsonl and checkpoints go there."""
    corpus: Path | None = None
    """Folder written by tools/preprocess_data.py; or give --data-path."""
    model_size: str | None = None
    """Name of a model size; a wrong one lists them all. Unless given, it is that of
    --pretrained-checkpoint, or 82m."""
    mixture: str | None = None
    """'uniform' (which is what a corpus is drawn by without it), or the path of a mixture.json."""
    seq_length: Count = 1024
    """Tokens per sample (the paper's cost figures imply 1024)."""
    train_iters: Count = 2000
    """Optimizer steps (paper: 2000 for the Chameleon proxy, 10000 for the other proxies)."""
    global_batch_size: BatchSize = 128
    """Sequences per step, over all ranks (paper: 128; Pile: 512)."""
    micro_batch_size: BatchSize = 8
    """Sequences per forward pass and rank."""
    seed: Seed = 1234
    """Of the initial weights and of the order of samples."""
    pretrained_checkpoint: Path | None = None
    """Start from these trained weights, a run folder (its latest checkpoint), one checkpoint folder
    or a Hugging Face GPT-2 folder, instead of random ones: for fine-tuning. Optimizer and schedule
    start anew."""
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
    overwrite: bool = False
    """Start anew; what run_dir holds is deleted as soon as the new run has begun."""
    data: DataOptions = dataclasses.field(default_factory=DataOptions)
    online: OnlineOptions = dataclasses.field(default_factory=OnlineOptions)
    boundaries: DocumentBoundaryOptions = dataclasses.field(default_factory=DocumentBoundaryOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    parallel: TrainingParallelOptions = dataclasses.field(default_factory=TrainingParallelOptions)
    checkpointing: CheckpointingOptions = dataclasses.field(default_factory=CheckpointingOptions)
    guards: GuardOptions = dataclasses.field(default_factory=GuardOptions)
    stopping: StoppingOptions = dataclasses.field(default_factory=StoppingOptions)
    validation: ValidationOptions = dataclasses.field(default_factory=ValidationOptions)
    logging: LoggingOptions = dataclasses.field(default_factory=LoggingOptions)
    profiling: ProfilingOptions = dataclasses.field(default_factory=ProfilingOptions)
