"""Options of tools/estimate_memory.py."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.options.parallel import TrainingParallelOptions
from megatron_chameleon.options.ranges import BatchSize, Count, Positive


@dataclasses.dataclass(frozen=True)
class EstimateMemoryOptions:
    """Print what each rank of a training run would hold, without starting anything.

    The flags are those of tools/pretrain_gpt.py, with what it reads from elsewhere.
    """

    model_size: str = "82m"
    """Name of a model size; a wrong one lists them all."""
    vocab_size: Count = 50257
    """Tokens of the tokenizer; padding is added here."""
    seq_length: Count = 1024
    """Tokens per sample."""
    global_batch_size: BatchSize = 128
    """Sequences per step, over all ranks."""
    micro_batch_size: BatchSize = 8
    """Sequences per forward pass and rank."""
    bf16: bool = False
    """Compute in bfloat16, with fp32 main weights and gradient accumulation."""
    world_size: Count = 1
    """Ranks of the run, over all nodes."""
    device_memory_gb: Positive | None = None
    """Memory of each device in GB (10^9 bytes). Given, the command says whether the run fits, and
    leaves with status 1 if it does not."""
    parallel: TrainingParallelOptions = dataclasses.field(default_factory=TrainingParallelOptions)
