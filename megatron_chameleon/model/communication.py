"""Count the bytes that the ranks of a training step send each other, from shapes.

With n = s * b tokens per micro-batch, hidden states of width h and t tensor-parallel ranks, a layer
all-reduces [n, h] twice in the forward pass and twice in the backward pass (Shoeybi et al. 2019,
"Megatron-LM", section 3). Under sequence parallelism, each of these all-reduces is a reduce-scatter
and an all-gather, and the backward pass gathers the inputs of both column-parallel products again
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2). Recomputed layers repeat the communication of their forward pass; a recomputed MLP repeats
its all-gather only.

Pipeline stages send [n, h] per micro-batch and boundary, forward and backward; v interleaved stages
per rank have v times as many boundaries (Narayanan et al. 2021, "Efficient Large-Scale Language
Model Training on GPU Clusters", section 2.2). Under sequence parallelism, a rank sends only its
shard.

Data-parallel ranks all-reduce the float32 gradients once per step; with a sharded optimizer, they
reduce-scatter the gradients, and gather the updated parameters in the compute dtype (Rajbhandari et
al. 2020, "ZeRO", section 7).

The counts leave out messages of a few numbers: losses, gradient norm, token counts and stop flags.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from megatron_chameleon.model.memory import FLOAT32_BYTES, TrainingSetup, stage_parameters

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "send"]
Group = Literal["tensor", "pipeline", "data", "embedding"]


@dataclasses.dataclass(frozen=True)
class Communication:
    """Calls of one collective by one rank in one training step.

    Attributes:
        purpose: the tensors that are communicated.
        operation: the collective.
        group: kind of the process group, as in parallel/layout.py's ``rank_groups``.
        ranks: number of ranks in the group.
        calls: number of calls. With ``--overlap-grad-reduce``, megatron splits calls of the data
            group into buckets, which are not counted here.
        tensor_bytes: bytes of the whole tensors over all calls, that is, of the input of a
            reduce-scatter and of the output of an all-gather.
        once_per_step: whether the calls follow the passes of all micro-batches.
    """

    purpose: str
    operation: Operation
    group: Group
    ranks: int
    calls: int
    tensor_bytes: int
    once_per_step: bool = False

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends, by ring algorithms (Patarasuk and Yuan 2009).

        With S bytes and n ranks: (n - 1) / n * S in a reduce-scatter or an all-gather, twice as
        much in an all-reduce, and S in a send.
        """
        if self.operation == "send":
            return float(self.tensor_bytes)
        passes = 2 if self.operation == "all_reduce" else 1
        return passes * (self.ranks - 1) / self.ranks * self.tensor_bytes


def step_communication(setup: TrainingSetup) -> list[list[Communication]]:
    """Count the communication of a training step on a rank of each pipeline stage."""
    stages = range(setup.parallel.pipeline_model_parallel_size)
    return [
        [*_tensor_parallel(setup, stage), *_pipeline(setup, stage), *_data_parallel(setup, stage)]
        for stage in stages
    ]


def _tensor_parallel(setup: TrainingSetup, stage: int) -> list[Communication]:
    parallel, config, recompute = setup.parallel, setup.config, setup.parallel.recompute
    ranks, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if ranks == 1:
        return []
    layers, virtual = config.num_layers // pipeline, parallel.num_virtual_stages_per_pipeline_rank
    first, last = int(stage == 0), int(stage == pipeline - 1)
    repeated = 0  # layers whose whole forward pass is repeated
    if recompute.recompute_granularity == "full":
        is_block = recompute.recompute_method == "block"
        repeated = recompute.unit * virtual if is_block else layers
    # Calls per micro-batch. Besides the layers, the first stage sums the embeddings over the shards
    # of the vocabulary, and the last stage sums the gradient of the output layer's input. Under
    # sequence parallelism, the last stage also gathers this input twice, and the first stage
    # gathers the gradient of the embeddings.
    calls: dict[Operation, int]
    if parallel.sequence_parallel:
        # megatron reduce-scatters the embeddings only if no position table is added to them.
        scattered = first if config.is_rotary else 0
        mlps = layers if recompute.recompute_granularity == "selective" else 0
        calls = {
            "all_reduce": first - scattered,
            "reduce_scatter": 4 * layers + 2 * repeated + scattered + last,
            "all_gather": 6 * layers + 2 * repeated + mlps + first + 2 * last,
        }
        # Ranks have the gradients of their shards of the sequence.
        purpose, summed = "norm and bias gradients", layers * config.replicated_layer_parameters
        summed += last * config.norm_parameters * config.hidden_size
    else:
        calls = {"all_reduce": 4 * layers + 2 * repeated + first + last}
        # Ranks have the gradients of their own heads.
        of_layer = 2 * config.kv_channels * config.norm_parameters if config.qk_layernorm else 0
        purpose, summed = "norm gradients", layers * of_layer
    micro_batches, hidden = setup.num_microbatches, setup.hidden_bytes
    found = [
        Communication(
            "activations", operation, "tensor", ranks, micro_batches * n, micro_batches * n * hidden
        )
        for operation, n in calls.items()
        if n
    ]
    if last:
        # One number per token, to find the largest denominator of the softmax, and then two sums.
        size = 3 * micro_batches * setup.micro_batch_size * setup.seq_length * FLOAT32_BYTES
        found.append(Communication("loss", "all_reduce", "tensor", ranks, 2 * micro_batches, size))
    if summed:
        size = summed * FLOAT32_BYTES
        found.append(Communication(purpose, "all_reduce", "tensor", ranks, 1, size, True))
    return found


def _pipeline(setup: TrainingSetup, stage: int) -> list[Communication]:
    parallel, last = setup.parallel, setup.parallel.pipeline_model_parallel_size - 1
    if last == 0:
        return []
    shards = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    # The last of all virtual stages sends nothing forward, and the first sends nothing backward.
    sends = 2 * parallel.num_virtual_stages_per_pipeline_rank - (stage == 0) - (stage == last)
    calls = setup.num_microbatches * sends
    size = calls * setup.hidden_bytes // shards
    found = [Communication("activations", "send", "pipeline", last + 1, calls, size)]
    if stage in (0, last) and not setup.config.untie_embeddings_and_output_weights:
        size, purpose = setup.embedding_elements * FLOAT32_BYTES, "embedding gradients"
        found.append(Communication(purpose, "all_reduce", "embedding", 2, 1, size, True))
    return found


def _data_parallel(setup: TrainingSetup, stage: int) -> list[Communication]:
    ranks, chunks = setup.data_parallel_size, setup.parallel.num_virtual_stages_per_pipeline_rank
    if ranks == 1:
        return []
    count = stage_parameters(setup, stage)
    gradients, parameters = count * FLOAT32_BYTES, count * setup.element_bytes
    if not setup.parallel.use_distributed_optimizer:
        return [Communication("gradients", "all_reduce", "data", ranks, chunks, gradients, True)]
    return [
        Communication("gradients", "reduce_scatter", "data", ranks, chunks, gradients, True),
        Communication("parameters", "all_gather", "data", ranks, chunks, parameters, True),
    ]
