"""Estimate the tensor memory of a training rank from shapes: states, and a step's peak.

Counts bytes of tensors, like torch's allocator. Not counted: on a GPU, the CUDA context, libraries'
workspaces, NCCL's buffers and fragmentation; on the CPU, gloo's copies of what it sends.

Activations of a layer follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", equation 2, for a model without dropout whose attention keeps no scores. With
n = s * b tokens, t tensor-parallel ranks, h and f the widths, a layer keeps

    n * (4h/r + 4h/t + 2f/t)     r = t under sequence parallelism, else 1

elements: the inputs and outputs of both layer norms (4h), queries, keys and values (3h), the output
of attention (h), and both sides of the activation (2f).
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.model.cross_entropy import CHUNK_ON_CPU
from megatron_chameleon.model.gpt import padded_vocab_size
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.parallel.options import TrainingParallelOptions

FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """Inputs of the memory estimate.

    Attributes:
        shape: of the model; sequences have its maximum length.
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
        """Bytes of one parameter or activation."""
        return BFLOAT16_BYTES if self.bf16 else FLOAT32_BYTES

    @property
    def embedding_elements(self) -> int:
        """Elements of this rank's shard of the tied embedding, with padding."""
        tensor = self.parallel.tensor_model_parallel_size
        rows = padded_vocab_size(self.shape.vocab_size, tensor) // tensor
        return rows * self.shape.size.hidden_size

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_size * self.shape.max_sequence_length

    @property
    def residual_bytes(self) -> int:
        """Bytes of one micro-batch's hidden states between layers."""
        shards = self.parallel.tensor_model_parallel_size if self.parallel.sequence_parallel else 1
        return self.tokens // shards * self.shape.size.hidden_size * self.element_bytes


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Bytes on each rank of a pipeline stage at the peak of a step.

    Attributes:
        stage: index from 0.
        parameters: weights in the computing precision.
        gradients: float32 buffers of all of them, also with a sharded optimizer.
        main_weights: the optimizer's float32 copy; none without bf16.
        moments: both of Adam's, in float32.
        activations: kept by forward passes for the backward passes of all micro-batches in flight.
        logits: of the one micro-batch whose loss is computed.
        working: gradients of activations and of one weight, and communication buffers. The update
            is fused and takes none.
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
        """Sum of all components."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Name -> bytes."""
        return {name: size for name, size in vars(self).items() if name != "stage"}


def estimate_memory(setup: TrainingSetup) -> list[RankMemory]:
    """Estimate the memory of one rank of every pipeline stage."""
    memories = []
    for stage in range(setup.parallel.pipeline_model_parallel_size):
        count, own = stage_parameters(setup, stage), optimized_parameters(setup, stage)
        kept, logits, working = max(_candidate_peaks(setup, stage), key=sum)
        memories.append(
            RankMemory(
                stage=stage,
                parameters=count * setup.element_bytes,
                gradients=count * FLOAT32_BYTES,
                main_weights=own * FLOAT32_BYTES if setup.bf16 else 0,
                moments=2 * own * FLOAT32_BYTES,
                activations=kept,
                logits=logits,
                working=working,
            )
        )
    return memories


def fullest_stage(setup: TrainingSetup) -> RankMemory:
    """Return the stage that needs the most memory."""
    return max(estimate_memory(setup), key=lambda memory: memory.total)


def stage_parameters(setup: TrainingSetup, stage: int) -> int:
    """Count the parameters on one rank of a pipeline stage."""
    parallel, size = setup.parallel, setup.shape.size
    pipeline = parallel.pipeline_model_parallel_size
    h, f = size.hidden_size, size.ffn_hidden_size
    # Norms and two biases are whole on every rank.
    sharded = (4 * h * h + 3 * h + 2 * h * f + f) // parallel.tensor_model_parallel_size
    count = size.num_layers // pipeline * (sharded + 2 * h + 4 * h)
    if stage == 0:
        count += setup.embedding_elements + setup.shape.max_sequence_length * h
    if stage == pipeline - 1:
        count += 2 * h  # the final layer norm
        count += setup.embedding_elements if pipeline > 1 else 0  # a copy of the tied embedding
    return count


def optimized_parameters(setup: TrainingSetup, stage: int) -> int:
    """Count the parameters whose optimizer state lies on one rank of a pipeline stage."""
    shards = setup.data_parallel_size if setup.parallel.use_distributed_optimizer else 1
    return -(-stage_parameters(setup, stage) // shards)


def chunks_in_flight(setup: TrainingSetup, stage: int) -> int:
    """Largest number of chunks of a stage between their forward and backward passes.

    Megatron's schedules: one forward, one backward once the pipeline is full (Narayanan et al.
    2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2).
    """
    pipeline = setup.parallel.pipeline_model_parallel_size
    virtual = setup.parallel.num_virtual_stages_per_pipeline_rank
    later = pipeline - stage - 1
    warm_up = later if virtual == 1 else 2 * later + (virtual - 1) * pipeline
    return min(warm_up + 1, setup.num_microbatches * virtual)


def _chunk_bytes(setup: TrainingSetup) -> tuple[int, int]:
    """Bytes that a chunk keeps of a micro-batch, and bytes recomputed of it at a time."""
    parallel, recompute, size = setup.parallel, setup.parallel.recompute, setup.shape.size
    tensor = parallel.tensor_model_parallel_size
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    layers = size.num_layers // parallel.pipeline_model_parallel_size // virtual
    inputs = setup.residual_bytes
    attention = 4 * setup.tokens * size.hidden_size // tensor * setup.element_bytes
    log_sum_exp = setup.tokens * size.num_attention_heads // tensor * FLOAT32_BYTES
    # Both sides of the activation.
    mlp = 2 * setup.tokens * (size.ffn_hidden_size // tensor) * setup.element_bytes
    layer = 4 * inputs + attention + log_sum_exp
    # Interleaved stages also keep sent outputs.
    sent = inputs if virtual > 1 else 0
    if recompute.recompute_granularity == "selective":
        return layers * layer + sent, mlp
    layer += mlp
    if recompute.recompute_granularity is None:
        return layers * layer + sent, 0
    unit = recompute.unit
    if recompute.recompute_method == "block":
        kept = unit * inputs + (layers - unit) * layer
        return kept + sent, layer if layers == unit else 0
    return layers // unit * inputs + sent, unit * layer


def _candidate_peaks(setup: TrainingSetup, stage: int) -> list[tuple[int, int, int]]:
    """List (activations, logits, working memory) at each possible peak of a step.

    Peaks are the loss and the backward passes of the output layer, a layer and the embedding.
    """
    pipeline = setup.parallel.pipeline_model_parallel_size
    size, tensor = setup.shape.size, setup.parallel.tensor_model_parallel_size
    element = setup.element_bytes
    hidden = setup.tokens * size.hidden_size * element
    ffn = size.ffn_hidden_size // tensor
    chunk, recomputed = _chunk_bytes(setup)
    kept = chunks_in_flight(setup, stage) * chunk
    buffers = hidden if setup.parallel.sequence_parallel else 0
    embedding = setup.embedding_elements * element
    # The output layer's gradient of the tied embedding is held until the tokens' is added.
    tied = embedding if pipeline == 1 else 0
    layer = 2 * hidden + setup.tokens * ffn * element + size.hidden_size * ffn * element
    peaks = [(kept + recomputed, 0, buffers + tied + layer)]
    if stage == 0:
        peaks.append((kept - chunk, 0, buffers + hidden + embedding + max(tied, embedding)))
    if stage == pipeline - 1:
        logits = setup.embedding_elements // size.hidden_size * setup.tokens * element
        head = 2 * setup.residual_bytes  # into and out of the final layer norm
        # On the CPU, the loss needs float32 buffers of one chunk: one for float32 logits, two for
        # bf16, and a third while the previous chunk's is still alive. A GPU's kernel needs none.
        elements = logits // element
        copies = (3 if elements > CHUNK_ON_CPU else 2) if setup.bf16 else 1
        loss = copies * FLOAT32_BYTES * min(CHUNK_ON_CPU, elements)
        # The loss, and then the backward pass of the output layer.
        for working in (loss, hidden + embedding):
            peaks.append((kept + head, logits, buffers + working))
    return peaks
