"""What the passes of a step hold on one rank, at the moment when it is most.

Per layer, as in Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", equation 2, but for a model without dropout and with attention that keeps no scores. With
n = s * b tokens, t tensor-parallel ranks, h and f the widths, elements kept by a layer are

    n * (4h/r + 4h/t + 2f/t)     r = t under sequence parallelism, else 1

for: the inputs and outputs of both layer norms (4h), queries, keys and values (3h), what attention
gave (h), and both sides of the activation (2f).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_chameleon.model.cross_entropy import CHUNK_ON_CPU
from megatron_chameleon.model.recompute import recompute_unit

if TYPE_CHECKING:
    from megatron_chameleon.model.memory import TrainingSetup

FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class ActivationPeak:
    """Bytes at the peak of a step's passes.

    Attributes:
        kept: for backward passes, over all micro-batches in flight.
        logits: of one micro-batch.
        working: gradients of activations and of a weight, and buffers of communication.
    """

    kept: int
    logits: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.kept + self.logits + self.working


def activation_peak(setup: TrainingSetup, stage: int) -> ActivationPeak:
    """The largest of: the loss, the backward passes of output layer, a layer and embedding."""
    return max(_moments_of_a_step(setup, stage), key=lambda moment: moment.total)


def chunks_in_flight(setup: TrainingSetup, stage: int) -> int:
    """Chunks of a stage that wait for their backward pass at most, one running it included.

    Megatron's schedules: one forward, one backward after the pipeline is full (Narayanan et al.
    2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2).
    """
    pipeline = setup.parallel.pipeline_model_parallel_size
    virtual = setup.parallel.num_virtual_stages_per_pipeline_rank
    later = pipeline - stage - 1
    warm_up = later if virtual == 1 else 2 * later + (virtual - 1) * pipeline
    return min(warm_up + 1, setup.num_microbatches * virtual)


def layer_bytes(setup: TrainingSetup) -> int:
    """What a layer that is not recomputed as a whole keeps of one micro-batch."""
    inside_mlp = _inside_mlp_bytes(setup)
    selective = setup.parallel.recompute.recompute_granularity == "selective"
    size, tensor = setup.shape.size, setup.parallel.tensor_model_parallel_size
    tokens = _tokens(setup)
    attention = 4 * tokens * size.hidden_size // tensor * setup.element_bytes
    log_sum_exp = tokens * size.num_attention_heads // tensor * FLOAT32_BYTES
    mlp = 0 if selective else inside_mlp
    return 4 * _residual_bytes(setup) + attention + log_sum_exp + mlp


def _inside_mlp_bytes(setup: TrainingSetup) -> int:
    """Of both sides of the activation."""
    width = setup.shape.size.ffn_hidden_size // setup.parallel.tensor_model_parallel_size
    return 2 * _tokens(setup) * width * setup.element_bytes


def _kept_by_chunk(setup: TrainingSetup) -> tuple[int, int]:
    """What a chunk keeps of a micro-batch, and what is recomputed of it at a time."""
    parallel, recompute = setup.parallel, setup.parallel.recompute
    layers = (
        setup.shape.size.num_layers
        // parallel.pipeline_model_parallel_size
        // parallel.num_virtual_stages_per_pipeline_rank
    )
    whole, inputs = layer_bytes(setup), _residual_bytes(setup)
    # Interleaved stages also keep what they sent on.
    sent = inputs if parallel.num_virtual_stages_per_pipeline_rank > 1 else 0
    if recompute.recompute_granularity != "full":
        selective = recompute.recompute_granularity == "selective"
        return layers * whole + sent, _inside_mlp_bytes(setup) if selective else 0
    unit = recompute_unit(recompute)
    if recompute.recompute_method == "block":
        kept = unit * inputs + (layers - unit) * whole
        return kept + sent, whole if layers == unit else 0
    return layers // unit * inputs + sent, unit * whole


def _moments_of_a_step(setup: TrainingSetup, stage: int) -> list[ActivationPeak]:
    pipeline = setup.parallel.pipeline_model_parallel_size
    size, tensor = setup.shape.size, setup.parallel.tensor_model_parallel_size
    tokens, element, residual = _tokens(setup), setup.element_bytes, _residual_bytes(setup)
    hidden = tokens * size.hidden_size * element
    ffn = size.ffn_hidden_size // tensor
    chunk, recomputed = _kept_by_chunk(setup)
    kept = chunks_in_flight(setup, stage) * chunk
    waiting = kept - chunk
    buffers = hidden if setup.parallel.sequence_parallel else 0
    embedding = setup.embedding_elements * element
    last = stage == pipeline - 1
    # The tied embedding's gradient by the output layer waits for that by the tokens.
    tied = embedding if pipeline == 1 else 0
    moments = [
        ActivationPeak(
            kept + recomputed,
            0,
            buffers + tied + 2 * hidden + tokens * ffn * element + size.hidden_size * ffn * element,
        )
    ]
    if stage == 0:
        moments.append(
            ActivationPeak(waiting, 0, buffers + hidden + embedding + max(tied, embedding))
        )
    if last:
        logits = setup.embedding_elements // size.hidden_size * tokens * element
        head = 2 * residual  # into and out of the final layer norm
        # The loss, and then the backward pass of the output layer.
        for working in (_rows_of_loss(setup, logits), hidden + embedding):
            moments.append(ActivationPeak(kept + head, logits, buffers + working))
    return moments


def _rows_of_loss(setup: TrainingSetup, logits: int) -> int:
    """What the loss computes in float32 at a time, on the CPU; a GPU's kernel holds nothing of it.

    Of float32 logits these are differences, a chunk of them; of others the chunk itself too, and
    the chunk before it, if there is one.
    """
    elements = logits // setup.element_bytes
    copies = (3 if elements > CHUNK_ON_CPU else 2) if setup.bf16 else 1
    return copies * FLOAT32_BYTES * min(CHUNK_ON_CPU, elements)


def _tokens(setup: TrainingSetup) -> int:
    return setup.micro_batch_size * setup.shape.max_sequence_length


def _residual_bytes(setup: TrainingSetup) -> int:
    """Of hidden states between layers."""
    parts = setup.parallel.tensor_model_parallel_size if setup.parallel.sequence_parallel else 1
    return _tokens(setup) // parts * setup.shape.size.hidden_size * setup.element_bytes
