"""Estimate a training rank's tensor memory from shapes: states, and the peak of a step.

The estimate counts bytes of tensors, like torch's allocator. It does not count the CUDA context,
workspaces of libraries, NCCL's buffers and fragmentation on a GPU, or, on the CPU, gloo's copies of
sent data. It does not count the dense mask between documents, nor what a hook allocates, such as
DoGE's gradient of each domain.

The activations of a layer follow Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models", equation 2, without the masks of dropout, which are described below, and
with attention that keeps no scores. With n = s * b tokens, t tensor-parallel ranks, and the widths
h of the hidden states, q of the queries, k of the keys and f of the MLP, a layer keeps

    n * (4h/r + (2q + 2k + a)/t + m/t)

elements, where r is t under sequence parallelism and 1 otherwise: the inputs and outputs of both
norms (4h), queries, keys and values (q + 2k), the output of attention (q), and the input and the
output of the activation function (m = 2f; with SwiGLU, gate, input and output, m = 3f). Norms and
rotary positions make new queries and keys (a = q + k). Otherwise, with fewer groups than heads, the
queries are copied out of the product that holds them (a = q).

Dropout of hidden states adds the masks of the embedding and of both outputs of each layer, with an
element per element of the hidden states: a byte on a GPU, a number of the compute dtype on the CPU.
Dropout of attention adds nothing on a GPU, whose kernels sample the mask again in the backward
pass. On the CPU, a layer keeps three float32 matrices [s, s] per head: probabilities, mask, product
of both.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.cross_entropy import CHUNK_ON_CPU
from megatron_chameleon.model.gpt import padded_vocab_size
from megatron_chameleon.parallel.options import TrainingParallelOptions

FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """Inputs of the memory estimate.

    Attributes:
        config: the model.
        parallel: the parallel layout, and which activations are recomputed.
        data_parallel_size: replicas of the model.
        micro_batch_size: sequences per forward pass (b).
        num_microbatches: forward passes per step and rank.
        bf16: compute in bfloat16, with main weights in float32.
        seq_length: tokens per sequence.
        hidden_dropout: dropout rate of hidden states.
        attention_dropout: dropout rate of attention probabilities.
        on_cpu: whether the model computes on the CPU, on which dropout needs more memory.
        muon: whether Muon trains the layers' matrices, with one moment instead of Adam's two.
    """

    config: ModelConfig
    parallel: TrainingParallelOptions
    data_parallel_size: int
    micro_batch_size: int
    num_microbatches: int
    bf16: bool
    seq_length: int
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    on_cpu: bool = False
    muon: bool = False

    @property
    def embedding_elements(self) -> int:
        """Number of elements in this rank's shard of the embedding, with padding."""
        tensor = self.parallel.tensor_model_parallel_size
        rows = padded_vocab_size(self.config.vocab_size, tensor) // tensor
        return rows * self.config.hidden_size

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of a parameter or an activation."""
        return BFLOAT16_BYTES if self.bf16 else FLOAT32_BYTES

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states [s, b, h] of a micro-batch, with the whole sequence."""
        tokens = self.micro_batch_size * self.seq_length
        return tokens * self.config.hidden_size * self.element_bytes


def estimate_memory(setup: TrainingSetup) -> list[dict[str, int]]:
    """Estimate the bytes on a rank of each pipeline stage at the peak of a step.

    Returns:
        A dictionary per stage:

        - parameters: weights in the compute dtype.
        - gradients: float32 buffers of all parameters, also with a sharded optimizer.
        - main_weights: the optimizer's float32 copy of the weights; 0 without bf16.
        - moments: moments of Adam or Muon, in float32.
        - activations: kept by forward passes for the backward passes of the micro-batches in
          flight.
        - logits: logits of the one micro-batch whose loss is computed.
        - working: gradients of activations and of one weight, and communication buffers. The
          optimizer's update is fused and needs no buffer.
    """
    parallel, recompute, config = setup.parallel, setup.parallel.recompute, setup.config
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    element = setup.element_bytes
    h, fc1 = config.hidden_size, config.fc1_size // tensor
    tokens = setup.micro_batch_size * setup.seq_length
    hidden = setup.hidden_bytes
    residual = hidden // (tensor if parallel.sequence_parallel else 1)

    # Bytes that a chunk keeps per micro-batch, and bytes of the activations recomputed at a time.
    layers = config.num_layers // pipeline // virtual
    log_sum_exp = tokens * config.num_attention_heads // tensor * FLOAT32_BYTES
    mlp = tokens * (fc1 + config.ffn_hidden_size // tensor) * element  # input and output
    attention = tokens * attention_width(config) // tensor * element
    mask = scores = 0  # of dropout: of hidden states [s, b, h], and of attention [b, n, s, s]
    if setup.hidden_dropout:
        mask = residual if setup.on_cpu else residual // element
    if setup.attention_dropout and setup.on_cpu:
        scores = log_sum_exp * setup.seq_length
    layer = 4 * residual + attention + log_sum_exp + mlp + 2 * mask + 3 * scores
    chunk, recomputed = layers * layer, 0
    if recompute.recompute_granularity == "selective":
        chunk, recomputed = layers * (layer - mlp), mlp
    elif recompute.recompute_method == "block":
        unit = recompute.unit
        chunk = unit * residual + (layers - unit) * layer
        recomputed = layer if layers == unit else 0
    elif recompute.recompute_granularity == "full":
        chunk, recomputed = layers // recompute.unit * residual, recompute.unit * layer
    if virtual > 1:
        chunk += residual  # interleaved stages also keep their sent outputs

    embedding = setup.embedding_elements * element
    # The output layer's gradient of a tied embedding is kept until the input embedding's gradient
    # is added.
    is_tied = not config.untie_embeddings_and_output_weights
    tied = embedding if is_tied and pipeline == 1 else 0
    buffers = hidden if parallel.sequence_parallel else 0
    optimizer_shards = setup.data_parallel_size if parallel.use_distributed_optimizer else 1
    stages = []
    for stage in range(pipeline):
        # Count the chunks whose activations are kept between their forward and backward passes. In
        # megatron's schedules, forward and backward passes alternate once the pipeline is full
        # (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
        # section 2.2).
        later = pipeline - stage - 1
        warm_up = later if virtual == 1 else 2 * later + (virtual - 1) * pipeline
        in_flight = min(warm_up + 1, setup.num_microbatches * virtual)
        kept = in_flight * chunk
        if stage == 0:
            kept += -(-in_flight // virtual) * mask  # of the embedding, in the first chunk
        # Candidates for the peak, as (activations, logits, working): the backward passes of a
        # layer, of the embedding and of the output layer, and the loss.
        gradients = 2 * hidden + max(tokens * fc1 * element + h * fc1 * element, scores)
        peaks = [(kept + recomputed, 0, buffers + tied + gradients)]
        if stage == 0:
            peaks.append((kept - chunk, 0, buffers + hidden + embedding + max(tied, embedding)))
        if stage == pipeline - 1:
            elements = setup.embedding_elements // h * tokens
            # On the CPU, the loss needs float32 buffers of one chunk: one for float32 logits, two
            # for bf16, and a third while the buffer of the previous chunk is alive. The kernel on a
            # GPU needs no buffer.
            copies = (3 if elements > CHUNK_ON_CPU else 2) if setup.bf16 else 1
            loss = copies * FLOAT32_BYTES * min(CHUNK_ON_CPU, elements)
            head = 2 * residual  # the input and output of the final norm
            for working in (loss, hidden + embedding):
                peaks.append((kept + head, elements * element, buffers + working))
        activations, logits, working = max(peaks, key=sum)
        count = stage_parameters(setup, stage)
        own = -(-count // optimizer_shards)  # parameters with optimizer state on this rank
        matrices = config.num_layers // pipeline * config.layer_matrix_parameters // tensor
        stages.append(
            {
                "parameters": count * element,
                "gradients": count * FLOAT32_BYTES,
                "main_weights": own * FLOAT32_BYTES if setup.bf16 else 0,
                "moments": (2 * own - setup.muon * matrices) * FLOAT32_BYTES,
                "activations": activations,
                "logits": logits,
                "working": working,
            }
        )
    return stages


def peak_bytes_per_rank(setup: TrainingSetup) -> int:
    """Estimate the bytes on a rank of the pipeline stage that needs the most memory."""
    return max(sum(stage.values()) for stage in estimate_memory(setup))


def attention_width(config: ModelConfig) -> int:
    """Count the elements per token that the attention of one layer keeps (see above)."""
    q, k = config.query_size, config.key_size
    width = 2 * q + 2 * k
    if config.is_rotary or config.qk_layernorm:
        return width + q + k
    return width + (q if config.num_query_groups < config.num_attention_heads else 0)


def stage_parameters(setup: TrainingSetup, stage: int) -> int:
    """Count the parameters on each rank of a pipeline stage."""
    parallel, config = setup.parallel, setup.config
    pipeline = parallel.pipeline_model_parallel_size
    sharded = config.layer_matrix_parameters + config.sharded_bias_parameters
    layer = sharded // parallel.tensor_model_parallel_size + config.replicated_layer_parameters
    count = config.num_layers // pipeline * layer
    if stage == 0:
        count += setup.embedding_elements + config.position_parameters
    if stage == pipeline - 1:
        count += config.norm_parameters * config.hidden_size  # the final norm
        # The output layer's matrix, or a copy of the tied embedding.
        if pipeline > 1 or config.untie_embeddings_and_output_weights:
            count += setup.embedding_elements
    return count
