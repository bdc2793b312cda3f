"""Initial weights that depend only on (seed, parameter name) and are equal in all layouts.

megatron samples weights rank by rank, so that a different pipeline layout starts from different
weights. Here each whole tensor is sampled from a generator seeded by (seed, name), and each rank
keeps its slice of the tensor. Distributions are GPT-2's: normal(0, 0.02), with the projections that
write to the residual stream scaled by 1/sqrt(2 * num_layers); biases zero; norms one and zero. With
``use_mup``, all matrices of the layers are also scaled by 1/sqrt(mup_width_mult).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel

from megatron_chameleon.model.config import INIT_STD, ModelConfig

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
_LAYERS = "decoder.layers."
_WRITES_TO_RESIDUAL = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")


@torch.no_grad()
def initialize_weights(model: GPTModel, config: ModelConfig, seed: int) -> None:
    """Overwrite every parameter of this rank's part of the model with its initial value."""
    tensor_size = model.pg_collection.tp.size()
    for local_name, parameter in model.named_parameters():
        name = global_name(model, local_name)
        if parameter.dim() == 1:
            is_norm_weight = "layernorm" in name and name.endswith(".weight")
            parameter.fill_(1.0 if is_norm_weight else 0.0)
            continue
        whole_shape = list(parameter.shape)
        dimension = partition_dimension(parameter)
        if dimension is not None:
            whole_shape[dimension] *= tensor_size
        whole = sample_matrix(name, whole_shape, config, seed)
        parameter.copy_(own_shard(model, parameter, whole))


def global_name(model: GPTModel, local_name: str) -> str:
    """Return a parameter's name in the whole model.

    Layers are numbered over all pipeline stages, and both copies of a tied embedding have the same
    name.
    """
    if local_name == OUTPUT_LAYER and model.share_embeddings_and_output_weights:
        return WORD_EMBEDDINGS  # the last pipeline stage's copy of the tied embedding
    match = re.match(r"decoder\.layers\.(\d+)\.(.*)", local_name)
    if match is None:
        return local_name
    layer_number = model.decoder.layers[int(match[1])].layer_number  # starts at 1, over all stages
    return f"decoder.layers.{layer_number - 1}.{match[2]}"


def partition_dimension(parameter: torch.nn.Parameter) -> int | None:
    """Return the dimension that tensor parallelism shards; None if the parameter is not sharded."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return int(parameter.partition_dim)  # type: ignore[attr-defined]


def own_shard(model: GPTModel, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of ``whole``, the unsharded ``parameter``.

    The gate and the input of SwiGLU are two blocks of one parameter, and each rank has a slice of
    both blocks.
    """
    dimension = partition_dimension(parameter)
    if dimension is None:
        return whole
    tensor_group = model.pg_collection.tp
    blocks = whole.chunk(parameter.partition_stride, dim=dimension)  # type: ignore[attr-defined]
    slices = [block.chunk(tensor_group.size(), dim=dimension) for block in blocks]
    return torch.cat([each[tensor_group.rank()] for each in slices], dim=dimension)


def sample_matrix(
    name: str, whole_shape: Sequence[int], config: ModelConfig, seed: int
) -> torch.Tensor:
    """Sample an unsharded float32 matrix [rows, columns]; rows of vocabulary padding are zero."""
    rows, columns = whole_shape
    std = INIT_STD
    if name.endswith(_WRITES_TO_RESIDUAL):
        std /= math.sqrt(2 * config.num_layers)
    if name.startswith(_LAYERS):
        std /= math.sqrt(config.mup_width_mult)
    is_vocabulary = name in (WORD_EMBEDDINGS, OUTPUT_LAYER)
    sampled_rows = config.vocab_size if is_vocabulary else rows
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    sampled = torch.randn(sampled_rows, columns, generator=generator) * std
    padding = sampled.new_zeros(rows - sampled_rows, columns)
    return torch.cat([sampled, padding])
