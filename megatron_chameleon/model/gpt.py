"""The model: megatron-core's GPTModel in the paper's architecture, for this rank of a layout."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import cross_entropy

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.attention import SDPACoreAttention
from megatron_chameleon.model.initialization import initialize_weights
from megatron_chameleon.model.layer_norm import SequenceParallelLayerNorm
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.parallel.layout import Layout, check_degrees

VOCABULARY_MULTIPLE = 128
"""Rows of the embedding are padded to a multiple of this, for aligned matrix products."""


class GPT(GPTModel):
    """megatron's GPTModel with torch's cross entropy where the vocabulary is not split.

    megatron's own goes over the logits several times to allow for tensor parallelism.
    """

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Losses [b, s] in float32 of ``labels`` [b, s] under ``logits`` [s, b, v]."""
        if self.pg_collection.tp.size() > 1:
            return super().compute_language_model_loss(labels, logits)
        by_position = labels.transpose(0, 1)  # [s, b], as the logits
        losses = cross_entropy(
            logits.float().flatten(0, 1), by_position.flatten(), reduction="none"
        )
        return losses.view_as(by_position).transpose(0, 1).contiguous()


def check_model_layout(size: ModelSize, options: ParallelOptions, seq_length: int) -> None:
    """Refuse a layout that the model cannot be cut into.

    Raises:
        UserError: with the degrees that would work.
    """
    check_degrees(options)
    tensor, pipeline = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    if size.num_attention_heads % tensor:
        raise UserError(
            f"--tensor-model-parallel-size {tensor} does not divide {size.num_attention_heads} "
            f"attention heads; {_divisors(size.num_attention_heads)} do"
        )
    if size.num_layers % pipeline:
        raise UserError(
            f"--pipeline-model-parallel-size {pipeline} does not divide {size.num_layers} layers; "
            f"{_divisors(size.num_layers)} do"
        )
    if options.sequence_parallel and seq_length % tensor:
        raise UserError(
            f"--sequence-parallel: sequences of {seq_length} tokens are not a multiple of "
            f"--tensor-model-parallel-size {tensor}"
        )


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """The vocabulary rounded up so that every tensor-parallel rank has the same number of rows."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor_size)
    return multiple * math.ceil(vocab_size / multiple)


def transformer_config(
    shape: ModelShape, layout: Layout, *, bf16: bool, per_token_loss: bool = False
) -> TransformerConfig:
    """The model in megatron's terms. Nothing needs Transformer Engine or Apex."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    return TransformerConfig(
        num_layers=shape.size.num_layers,
        hidden_size=shape.size.hidden_size,
        ffn_hidden_size=shape.size.ffn_hidden_size,
        num_attention_heads=shape.size.num_attention_heads,
        tensor_model_parallel_size=layout.tensor_size,
        pipeline_model_parallel_size=layout.pipeline_size,
        sequence_parallel=layout.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=bf16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # megatron's own initialisation also marks which tensors are split, so it runs although
        # initialize_weights then overwrites the values.
        perform_initialization=True,
        calculate_per_token_loss=per_token_loss,
        cuda_graph_scope=[],
        gradient_accumulation_fusion=False,  # needs Apex
        persist_layer_norm=False,  # needs Apex
        masked_softmax_fusion=False,  # SDPACoreAttention fuses it
        bias_activation_fusion=False,  # would use the tanh approximation of GELU
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        batch_p2p_comm=False,
    )


def build_model(
    shape: ModelShape,
    layout: Layout,
    seed: int,
    *,
    bf16: bool = False,
    per_token_loss: bool = False,
) -> GPTModel | Float16Module:
    """This rank's part of the model, with its initial weights, on its device.

    Args:
        shape: of the whole model.
        layout: of which this rank has a part.
        seed: of the initial weights.
        bf16: compute in bfloat16.
        per_token_loss: every token of a step that has a loss counts the same in training. Without
            it every micro-batch does, which is the same as long as no token is left out.
    """
    config = transformer_config(shape, layout, bf16=bf16, per_token_loss=per_token_loss)
    model = GPT(
        config=config,
        transformer_layer_spec=_block_spec(config),
        vocab_size=padded_vocab_size(shape.vocab_size, layout.tensor_size),
        max_sequence_length=shape.max_sequence_length,
        pre_process=layout.is_first_stage,
        post_process=layout.is_last_stage,
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )
    initialize_weights(model, shape, seed)
    if layout.is_last_stage:
        _mask_padded_vocabulary(model, shape.vocab_size, layout)
    model.to(layout.device)
    return Float16Module(config, model) if bf16 else model


def unwrap(model: torch.nn.Module) -> GPTModel:
    """The GPTModel inside data-parallel and mixed-precision wrappers."""
    inner: Any = model
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner


def _block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = SequenceParallelLayerNorm
    layer.submodules.pre_mlp_layernorm = SequenceParallelLayerNorm
    layer.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config),
        layer_norm=SequenceParallelLayerNorm,
    )


def _mask_padded_vocabulary(model: GPTModel, vocab_size: int, layout: Layout) -> None:
    """Logits of rows that only pad the vocabulary become the lowest number there is.

    Otherwise they would take part in the softmax, and losses would depend on the padding.
    """
    padded = padded_vocab_size(vocab_size, layout.tensor_size)
    if padded == vocab_size:
        return
    rows_per_rank = padded // layout.tensor_size

    def mask(
        _layer: torch.nn.Module, _inputs: object, output: tuple[torch.Tensor, object]
    ) -> tuple[torch.Tensor, object]:
        logits = output[0]
        first_row = 0 if logits.size(-1) == padded else layout.tensor_rank * rows_per_rank
        kept = min(max(vocab_size - first_row, 0), logits.size(-1))
        logits[..., kept:] = torch.finfo(logits.dtype).min
        return logits, output[1]

    model.output_layer.register_forward_hook(mask)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
