"""Build this rank's part of the model: megatron-core's GPTModel with our layers and loss."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
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
from torch.nn.functional import gelu, silu

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.compiled_layers import (
    GroupedRowParallelLinear,
    TraceableColumnParallelLinear,
)
from megatron_chameleon.model.config import MUP_RELEASE, Activation, ModelConfig
from megatron_chameleon.model.cross_entropy import chunked_cross_entropy
from megatron_chameleon.model.document_attention import document_blocks
from megatron_chameleon.model.initialization import initialize_weights
from megatron_chameleon.model.layers import (
    NORMS,
    PlainMLP,
    RecomputedMLP,
    RotaryPositions,
    SDPACoreAttention,
    SelfAttention,
    additive_mask,
)
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.parallel.options import ParallelOptions, RecomputeOptions
from megatron_chameleon.parallel.releases import require_release

VOCABULARY_MULTIPLE = 128
"""The embedding's rows are padded to a multiple of this number, for aligned matrix products."""

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
    "swiglu": silu,
}

# From 0.19 on, megatron-core logs at every model that HybridModel will replace it. HybridModel
# needs Transformer Engine.
logging.getLogger(GPTModel.__module__).addFilter(
    lambda record: "GPTModel IS DEPRECATED" not in record.getMessage()
)


class GPT(GPTModel):
    """megatron's GPTModel with a cross entropy that keeps no second copy of the logits.

    Args:
        model: the whole model. Rows of the embedding beyond its vocabulary are padding, which the
            logits include and the softmax of the loss excludes.
        settings: arguments of megatron's GPTModel.
    """

    def __init__(self, *, model: ModelConfig, **settings: Any) -> None:
        super().__init__(**settings)
        self.real_vocab_size = model.vocab_size
        if model.is_rotary:
            self.rotary_pos_emb = RotaryPositions(model, self.config)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **more: Any,
    ) -> Any:
        """Return losses [b, s] if ``labels`` are passed, otherwise logits [b, s, v].

        ``attention_mask`` is None for causal attention, a boolean mask [b, 1, s, s] (True is
        masked), or, for flex attention within documents, the document starts [b, s] int64 of
        :func:`~megatron_chameleon.blend.boundaries.document_starts`. It is converted once, for all
        layers.
        """
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            attention_mask = additive_mask(attention_mask, self.config.params_dtype)
        elif attention_mask is not None:
            assert attention_mask.dtype == torch.int64, "expected document starts"
            attention_mask = document_blocks(attention_mask)
        return super().forward(input_ids, position_ids, attention_mask, **more)

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Compute float32 losses [b, s] of ``labels`` [b, s] under ``logits`` [s, b, v].

        The backward pass overwrites the logits.
        """
        by_position = labels.transpose(0, 1)  # [s, b], like the logits
        tensor_group = self.pg_collection.tp
        group = tensor_group if tensor_group.size() > 1 else None
        losses = chunked_cross_entropy(logits, by_position, self.real_vocab_size, group)
        return losses.transpose(0, 1).contiguous()


def check_model_layout(config: ModelConfig, options: ParallelOptions, seq_length: int) -> None:
    """Check that the model can be partitioned as ``options`` require.

    Raises:
        UserError: if the model cannot be partitioned. For a parallelism degree that does not divide
            the model, the message lists the degrees that do.
    """
    tensor, training = options.tensor_model_parallel_size, options.for_training()
    stage_layers = config.num_layers // options.pipeline_model_parallel_size
    has_groups = config.num_query_groups < config.num_attention_heads
    heads = "key-value heads" if has_groups else "attention heads"
    for degree, number, what in (
        ("tensor-model-parallel-size", config.num_query_groups, heads),
        ("tensor-model-parallel-size", config.ffn_hidden_size, "columns of the MLP"),
        ("pipeline-model-parallel-size", config.num_layers, "layers"),
        ("num-virtual-stages-per-pipeline-rank", stage_layers, "layers of a pipeline stage"),
    ):
        value = getattr(training, degree.replace("-", "_"))
        if number % value:
            divisors = ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
            raise UserError(f"--{degree} {value} does not divide {number} {what}; {divisors} do")
    training.recompute.check_layers(stage_layers // training.num_virtual_stages_per_pipeline_rank)
    if options.sequence_parallel and seq_length % tensor:
        raise UserError(
            f"--sequence-parallel: sequences of {seq_length} tokens are not a multiple of "
            f"--tensor-model-parallel-size {tensor}"
        )


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """Round the vocabulary up so that every tensor-parallel rank has the same number of rows."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor_size)
    return multiple * math.ceil(vocab_size / multiple)


def transformer_config(
    model: ModelConfig,
    layout: Layout,
    *,
    bf16: bool = False,
    per_token_loss: bool = False,
    recompute: RecomputeOptions | None = None,
    deterministic: bool = False,
    gradient_accumulation_fusion: bool = False,
    hidden_dropout: float = 0.0,
    attention_dropout: float = 0.0,
) -> TransformerConfig:
    """Return megatron's config of the model, which needs neither Transformer Engine nor Apex.

    Args:
        model: the whole model.
        layout: layout of this rank.
        bf16: compute in bfloat16.
        per_token_loss: weight all unmasked tokens of a step equally. Otherwise micro-batches are
            weighted equally, which differs only with masked tokens.
        recompute: activations that the backward pass recomputes; default: none.
        deterministic: select megatron's deterministic implementations.
        gradient_accumulation_fusion: accumulate into gradient buffers within the matrix product, on
            a GPU by Apex's kernel; the model chunks must be wrapped for data parallelism.
        hidden_dropout: dropout rate of the embeddings and of the outputs of attention and MLP, in
            training mode.
        attention_dropout: dropout rate of attention probabilities, in training mode.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    interleaved, is_gated = layout.virtual_size > 1, model.activation == "swiglu"
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        activation_func=ACTIVATIONS[model.activation],
        gated_linear_unit=is_gated,
        # The activation is a module, though not one of Transformer Engine: see SwiGLU.
        use_te_activation_func=is_gated,
        normalization=model.normalization,
        layernorm_epsilon=model.layernorm_epsilon,
        qk_layernorm=model.qk_layernorm,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        tensor_model_parallel_size=layout.tensor_size,
        pipeline_model_parallel_size=layout.pipeline_size,
        # megatron expects None for a pipeline without interleaving.
        virtual_pipeline_model_parallel_size=layout.virtual_size if interleaved else None,
        sequence_parallel=layout.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=bf16,
        hidden_dropout=hidden_dropout,
        attention_dropout=attention_dropout,
        calculate_per_token_loss=per_token_loss,
        deterministic_mode=deterministic,
        cuda_graph_scope=[],
        # megatron's other fusions are off by default: fused norms need Apex, the fused bias and
        # GELU would always use GELU's tanh approximation, and SDPACoreAttention fuses the softmax.
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        # Interleaved stages compute wrong numbers with batched sends, and other stages reject the
        # overlap.
        batch_p2p_comm=False,
        # Outputs can be freed once they are sent, but interleaved stages do not wait for the send.
        deallocate_pipeline_outputs=not interleaved,
        overlap_p2p_comm=interleaved,
        **(recompute or RecomputeOptions()).config_fields(),
        **_mup_fields(model),
    )


def _mup_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of megatron's config for ``use_mup``.

    Raises:
        UserError: if the installed release of megatron-core cannot train the model.
    """
    if not model.use_mup:
        return {}
    require_release("--use-mup", MUP_RELEASE)
    fields = ("use_mup", "mup_base_hidden_size", "mup_base_head_dim")
    return {name: getattr(model, name) for name in fields}


def build_model(
    model: ModelConfig, layout: Layout, seed: int, **settings: Any
) -> GPTModel | Float16Module:
    """Build this rank's part of a model without interleaving; see :func:`build_model_chunks`."""
    (chunk,) = build_model_chunks(model, layout, seed, **settings)
    return chunk


def build_model_chunks(
    model: ModelConfig, layout: Layout, seed: int, **settings: Any
) -> list[GPTModel | Float16Module]:
    """Build this rank's chunks of the model, with initial weights, on its device.

    There is one chunk per virtual pipeline stage; all chunks share one config.

    Args:
        model: the whole model.
        layout: layout of this rank.
        seed: random seed of the initial weights.
        settings: options of :func:`transformer_config`.
    """
    config = transformer_config(model, layout, **settings)
    norm = NORMS[model.normalization]
    layer = get_gpt_layer_local_spec(qk_layernorm=model.qk_layernorm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    layer.submodules.self_attention.module = SelfAttention
    attention.core_attention = SDPACoreAttention
    if model.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    attention.linear_qkv = TraceableColumnParallelLinear
    attention.linear_proj = GroupedRowParallelLinear
    is_recomputed = config.recompute_granularity == "selective"
    layer.submodules.mlp = RecomputedMLP if is_recomputed else PlainMLP
    chunks: list[GPTModel | Float16Module] = []
    for stage in range(layout.virtual_size):
        # megatron expects None for a pipeline without interleaving.
        vp_stage = stage if layout.virtual_size > 1 else None
        chunk = GPT(
            model=model,
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[layer] * get_num_layers_to_build(config, vp_stage),
                layer_norm=norm,
            ),
            vocab_size=padded_vocab_size(model.vocab_size, layout.tensor_size),
            max_sequence_length=model.max_sequence_length,
            pre_process=layout.is_first_stage and stage == 0,
            post_process=layout.is_last_stage and stage == layout.virtual_size - 1,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type=model.position_embedding_type,
            rotary_percent=model.rotary_percent,
            vp_stage=vp_stage,
        )
        # megatron's own initialization is overwritten, but is needed: it marks the sharded tensors,
        # which initialize_weights has to slice.
        initialize_weights(chunk, model, seed)
        chunk.to(layout.device)
        chunks.append(Float16Module(config, chunk) if config.bf16 else chunk)
    return chunks


def unwrap(model: torch.nn.Module) -> GPTModel:
    """Return the GPTModel inside a module's data-parallel and mixed-precision wrappers."""
    inner: Any = model
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner
