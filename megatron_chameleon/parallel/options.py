"""Options of the parallel layout: parallelism degrees, recomputation, process groups."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from megatron_chameleon.errors import UserError
from megatron_chameleon.ranges import CheckedOptions, Count, Minutes


def is_rank_0() -> bool:
    """Whether this process is rank 0 of torchrun's, or the only process."""
    return int(os.environ.get("RANK", "0")) == 0


@dataclasses.dataclass(frozen=True)
class RecomputeOptions(CheckedOptions):
    """Recompute activations in the backward pass instead of storing them. Results do not change."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """With full, keep only the input of each layer, at the cost of a third more compute. With
    selective, keep everything except the activations inside each MLP, at the cost of a fifth more
    compute (Megatron's --recompute-modules mlp; Megatron's core_attn would save nothing here,
    because attention never materializes its scores)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Only with --recompute-granularity full. With uniform (default), recompute all layers, in
    units of --recompute-num-layers. With block, recompute only the first --recompute-num-layers
    layers of each (virtual) pipeline stage."""
    recompute_num_layers: Count | None = None
    """Number of layers for --recompute-method; only with --recompute-granularity full; default:
    1."""

    def __post_init__(self) -> None:
        """Raise UserError for an option that has no effect."""
        super().__post_init__()
        if self.recompute_granularity != "full":
            self.reject_changed(
                ["recompute_method", "recompute_num_layers"],
                "needs --recompute-granularity full",
            )

    @property
    def unit(self) -> int:
        """Number of layers recomputed together (uniform), or recomputed in each stage (block)."""
        return 1 if self.recompute_num_layers is None else self.recompute_num_layers

    def check_layers(self, layers_per_chunk: int) -> None:
        """Raise UserError if ``unit`` does not fit the layers of a (virtual) pipeline stage."""
        if self.recompute_granularity != "full":
            return
        if self.unit > layers_per_chunk:
            raise UserError(
                f"--recompute-num-layers {self.unit}: a (virtual) pipeline stage has "
                f"{layers_per_chunk} layer(s); pass at most that many"
            )
        if self.recompute_method != "block" and layers_per_chunk % self.unit:
            raise UserError(
                f"--recompute-num-layers {self.unit} does not divide the {layers_per_chunk} layers "
                "of a (virtual) pipeline stage; pass a divisor, or --recompute-method block"
            )

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of megatron's TransformerConfig."""
        if self.recompute_granularity == "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": self.recompute_method or "uniform",
                "recompute_num_layers": self.unit,
            }
        if self.recompute_granularity == "selective":
            # model/layers.py recomputes the MLP.
            return {"recompute_granularity": "selective", "recompute_modules": []}
        return {}


@dataclasses.dataclass(frozen=True)
class ParallelOptions(CheckedOptions):
    """Model parallelism over torchrun's ranks; the remaining factor is the data-parallel size."""

    tensor_model_parallel_size: Count = 1
    """Number of ranks over which each layer is sharded; must divide the number of attention
    heads."""
    pipeline_model_parallel_size: Count = 1
    """Number of pipeline stages; must divide the number of layers."""
    sequence_parallel: bool = False
    """Also shard layer norms and residuals along the sequence; needs tensor parallelism."""
    distributed_timeout_minutes: Minutes = 10
    """Timeout of collectives in minutes; increase it if rank 0 first has to read much data."""

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other."""
        super().__post_init__()
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise UserError(
                "--sequence-parallel shards over tensor-parallel ranks; "
                "leave it out, or pass --tensor-model-parallel-size 2 or more"
            )

    def for_training(self) -> TrainingParallelOptions:
        """Return these options, with defaults for the options that only training has."""
        if isinstance(self, TrainingParallelOptions):
            return self
        return TrainingParallelOptions(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class TrainingParallelOptions(ParallelOptions):
    """Parallelism options of training, including those of gradients and the optimizer."""

    num_virtual_stages_per_pipeline_rank: Count = 1
    """Number of interleaved virtual stages per pipeline rank: less idle time, more
    communication."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer's state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over the data-parallel ranks during the backward pass."""
    overlap_param_gather: bool = False
    """During the next forward pass, gather the parameters that a sharded optimizer has updated."""
    recompute: RecomputeOptions = dataclasses.field(default_factory=RecomputeOptions)

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other."""
        super().__post_init__()
        virtual = self.num_virtual_stages_per_pipeline_rank
        if virtual > 1 == self.pipeline_model_parallel_size:
            raise UserError(
                f"--num-virtual-stages-per-pipeline-rank {virtual} interleaves pipeline stages; "
                "leave it out, or pass --pipeline-model-parallel-size 2 or more"
            )
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise UserError("--overlap-param-gather needs --use-distributed-optimizer; pass both")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise UserError("--overlap-param-gather needs --overlap-grad-reduce; pass both")

    def check_microbatches(self, num_microbatches: int) -> None:
        """Raise UserError if the interleaved schedule cannot run ``num_microbatches`` per step."""
        virtual = self.num_virtual_stages_per_pipeline_rank
        pipeline = self.pipeline_model_parallel_size
        if virtual > 1 and num_microbatches % pipeline:
            raise UserError(
                f"--num-virtual-stages-per-pipeline-rank {virtual}: {num_microbatches} "
                f"micro-batch(es) per step and rank are not a multiple of "
                f"--pipeline-model-parallel-size {pipeline}; change --global-batch-size or "
                "--micro-batch-size"
            )
