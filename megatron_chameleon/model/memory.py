"""What a rank's tensors take while it trains, from shapes alone: states, and the peak of a step.

Bytes of tensors are counted, as torch's allocator does. What comes on top on a GPU is not: the CUDA
context, the libraries' workspaces, NCCL's buffers and what fragmentation wastes. Nor are, on the
CPU, the copies that gloo makes of what it sends.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.model.activation_memory import activation_peak
from megatron_chameleon.model.gpt import padded_vocab_size
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.options.parallel import TrainingParallelOptions

FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """All that the memory of a rank depends on.

    Attributes:
        shape: of the model; sequences are as long as it has positions.
        parallel: the layout, and what is recomputed.
        data_parallel_size: replicas of the model.
        micro_batch_size: sequences of one pass (b).
        num_microbatches: passes of a step on each rank.
        bf16: compute in bfloat16, with main weights in float32.
    """

    shape: ModelShape
    parallel: TrainingParallelOptions
    data_parallel_size: int
    micro_batch_size: int
    num_microbatches: int
    bf16: bool

    @property
    def element_bytes(self) -> int:
        """Of a parameter and of an activation."""
        return BFLOAT16_BYTES if self.bf16 else FLOAT32_BYTES

    @property
    def embedding_elements(self) -> int:
        """Of one rank's part of the tied embedding, padding included."""
        tensor = self.parallel.tensor_model_parallel_size
        rows = padded_vocab_size(self.shape.vocab_size, tensor) // tensor
        return rows * self.shape.size.hidden_size


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Bytes on each rank of a pipeline stage at the peak of a step.

    Attributes:
        stage: from 0 on.
        parameters: weights that are computed with.
        gradients: float32 buffers of all of them, whether or not the optimizer is sharded.
        main_weights: the optimizer's own float32 copy; none where weights are in float32.
        moments: both of Adam's, in float32.
        activations: what forward passes keep for their backward passes, over all micro-batches in
            flight.
        logits: of the one micro-batch whose loss is computed.
        working: gradients on their way through the backward pass, and buffers of communication.
            The update itself is fused and takes none.
    """

    stage: int
    parameters: int
    gradients: int
    main_weights: int
    moments: int
    activations: int
    logits: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Name -> bytes."""
        fields = dataclasses.asdict(self)
        del fields["stage"]
        return fields


def estimate_memory(setup: TrainingSetup) -> list[RankMemory]:
    """The memory of a rank of every pipeline stage; those of other ranks are alike."""
    stages = range(setup.parallel.pipeline_model_parallel_size)
    return [_stage_memory(setup, stage) for stage in stages]


def fullest_stage(setup: TrainingSetup) -> RankMemory:
    """The stage that needs most."""
    return max(estimate_memory(setup), key=lambda memory: memory.total)


def stage_parameters(setup: TrainingSetup, stage: int) -> int:
    """Parameters that one rank of a pipeline stage holds."""
    parallel, size = setup.parallel, setup.shape.size
    pipeline = parallel.pipeline_model_parallel_size
    tensor = parallel.tensor_model_parallel_size
    count = size.num_layers // pipeline * layer_parameters_of_rank(size, tensor)
    if stage == 0:
        count += setup.embedding_elements + setup.shape.max_sequence_length * size.hidden_size
    if stage == pipeline - 1:
        count += 2 * size.hidden_size  # the final layer norm
        count += setup.embedding_elements if pipeline > 1 else 0  # a copy of the tied embedding
    return count


def optimized_parameters(setup: TrainingSetup, stage: int) -> int:
    """Those of them whose optimizer state and final gradient lie on that rank."""
    shards = setup.data_parallel_size if setup.parallel.use_distributed_optimizer else 1
    return -(-stage_parameters(setup, stage) // shards)


def layer_parameters_of_rank(size: ModelSize, tensor: int) -> int:
    """Parameters of a layer on one of ``tensor`` ranks: layer norms and two biases are whole."""
    h, f = size.hidden_size, size.ffn_hidden_size
    split = 4 * h * h + 3 * h + 2 * h * f + f
    return split // tensor + 2 * h + 4 * h


def _stage_memory(setup: TrainingSetup, stage: int) -> RankMemory:
    count = stage_parameters(setup, stage)
    own = optimized_parameters(setup, stage)
    activations = activation_peak(setup, stage)
    return RankMemory(
        stage=stage,
        parameters=count * setup.element_bytes,
        gradients=count * FLOAT32_BYTES,
        main_weights=own * FLOAT32_BYTES if setup.bf16 else 0,
        moments=2 * own * FLOAT32_BYTES,
        activations=activations.kept,
        logits=activations.logits,
        working=activations.working,
    )
