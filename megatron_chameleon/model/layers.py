"""Attention, rotary positions, norms, SwiGLU and recomputed MLP that replace megatron's.

They need neither Apex nor Transformer Engine.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import pad, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from megatron_chameleon.model.compiled_layers import (
    GroupedRowParallelLinear,
    TraceableColumnParallelLinear,
)
from megatron_chameleon.model.config import ModelConfig, Normalization
from megatron_chameleon.model.document_attention import document_attention

# Flash attention needs head dimensions that are a multiple of 8. torch pads other dimensions, but
# only for one of its kernels.
HEAD_DIM_MULTIPLE_ON_GPU = 8


class SelfAttention(MegatronSelfAttention):
    """megatron's self-attention of a training step, without inference and packed sequences.

    Queries and keys are rotated straight out of the product that holds them, by angles whose cosine
    and sine are computed once (see :class:`RotaryPositions`). megatron copies the queries of groups
    first, and computes cosine and sine in every layer, of queries and of keys.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor | None = None,
        **unsupported: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [s, b, h] of ``hidden_states`` [s, b, h], and its bias.

        ``rotary_pos_emb`` is from :class:`RotaryPositions`; ``attention_mask`` is an argument of
        :class:`SDPACoreAttention`.
        """
        assert all(value is None for value in unsupported.values()), unsupported.keys()
        product, _ = self.linear_qkv(hidden_states)
        groups, head_dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        grouped = product.unflatten(-1, (groups, -1, head_dim))  # [s, b, groups, q + k + v, d]
        query, key, value = grouped.split((grouped.size(3) - 2, 1, 1), dim=3)
        if self.config.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary_pos_emb is not None:
            query, key = Rotation.apply(query, rotary_pos_emb), Rotation.apply(key, rotary_pos_emb)
        context = self.core_attention(
            query.flatten(2, 3), key.squeeze(3), value.squeeze(3), attention_mask
        )
        output: tuple[torch.Tensor, torch.Tensor | None] = self.linear_proj(context)
        return output


class SDPACoreAttention(MegatronModule):
    """Core attention with torch's scaled_dot_product_attention (flash, cuDNN or CPU kernels).

    Replaces megatron's unfused DotProductAttention. The s x s scores are materialized only for
    dropout on the CPU, whose fast kernel does not support it. Dropout is active in training mode.
    Attention within documents may also use flex attention, see :func:`document_blocks`.
    Unsupported settings and arguments raise AssertionError.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1, "context parallelism needs Transformer Engine"
        assert config.window_size is None, "sliding windows are not supported here"
        assert config.softmax_type == "vanilla", "only the plain softmax is supported here"
        assert attention_type == "self"
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout
        # The scale is that of the unpadded head dimension.
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        on_gpu = torch.cuda.is_available()
        self.head_dim_multiple = HEAD_DIM_MULTIPLE_ON_GPU if on_gpu else 1

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Compute attention of projected heads.

        Args:
            query: [s, b, heads, head_dim].
            key: [s, b, groups, head_dim].
            value: [s, b, groups, head_dim].
            attention_mask: None for the mask of ``attn_mask_type``; otherwise a mask that replaces
                it, broadcastable to [b, heads, s, s]: boolean, True where attention is NOT allowed
                (megatron's convention), or the :func:`additive_mask` of a boolean mask in the dtype
                of ``query``, which is faster if several layers use the mask; or int32 [n], from
                :func:`~megatron_chameleon.model.document_attention.document_blocks`.
            attn_mask_type: overrides the constructor's mask type.
            attention_bias: must be None.
            packed_seq_params: must be None.

        Returns:
            [s, b, heads * head_dim].
        """
        assert attention_bias is None, "an attention bias is not supported here"
        assert packed_seq_params is None, "packed sequences need Transformer Engine"
        padding = -query.size(-1) % self.head_dim_multiple
        # [b, n, s, d]; appended zeros do not change scores. pad() copies even if it adds nothing.
        q, k, v = (
            (pad(t, (0, padding)) if padding else t).permute(1, 2, 0, 3)
            for t in (query, key, value)
        )
        mask_type = attn_mask_type or self.attn_mask_type
        dropout = self.dropout if self.training else 0.0
        if attention_mask is None:
            assert mask_type in (AttnMaskType.causal, AttnMaskType.no_mask), mask_type
        elif attention_mask.dtype == torch.int32:
            assert dropout == 0.0, "flex attention has no dropout"
            context = document_attention(q, k, v, attention_mask, self.softmax_scale)
            return self._flat(context, query)
        elif attention_mask.dtype == torch.bool:
            attention_mask = ~attention_mask
        # Tensor-parallel ranks have different heads, so they sample different masks. Under sequence
        # parallelism, megatron runs the whole layer with the tracked generator.
        is_forked = dropout > 0.0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if is_forked else contextlib.nullcontext():
            context = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=attention_mask,
                dropout_p=dropout,
                is_causal=attention_mask is None and mask_type == AttnMaskType.causal,
                scale=self.softmax_scale,
                enable_gqa=q.size(1) != k.size(1),
            )
        return self._flat(context, query)

    @staticmethod
    def _flat(context: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Return ``context`` [b, n, s, d] as [s, b, heads * head_dim], without padding."""
        unpadded = context[..., : query.size(-1)]
        return unpadded.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a boolean mask to a mask that is added to scores: 0 where allowed, else -inf.

    torch's kernels would convert a boolean mask in every layer and keep each copy for the backward
    pass.

    Args:
        mask: boolean, True where attention is NOT allowed (megatron's convention).
        dtype: dtype of the queries.
    """
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """Compute the angle per position of each pair of rotated elements, [rotary_dim / 2] float32.

    See :class:`~megatron_chameleon.model.config.RopeScaling` for the sources of each scaling.
    """
    base, dim, scaling = model.rotary_base, model.rotary_dim, model.rope_scaling
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling is None:
        return frequencies
    divided, original = frequencies / scaling.factor, scaling.original_max_position_embeddings
    if scaling.type == "linear":
        return divided
    if scaling.type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        rotations = original * frequencies / (2 * math.pi)
        kept = ((rotations - low) / (high - low)).clamp(0, 1)
    else:

        def pair_with(rotations: float) -> float:
            """The pair, counted from 0, that rotates so often in the original length."""
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        width = (last - first) or 0.001
        kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return kept * frequencies + (1 - kept) * divided


class RotaryPositions(RotaryEmbedding):
    """Rotations by position, with every scaling of :func:`inverse_frequencies`.

    megatron returns angles. This class returns the factors of :class:`Rotation`, so that no layer
    computes a cosine or sine.
    """

    def __init__(self, model: ModelConfig, config: TransformerConfig) -> None:
        super().__init__(
            config.kv_channels, model.rotary_percent, rotary_base=int(model.rotary_base)
        )
        device = torch.cuda.current_device()
        self.inv_freq: torch.Tensor = inverse_frequencies(model).to(device)
        self.factor = model.rope_scaling.attention_factor if model.rope_scaling else 1.0
        self.rest = config.kv_channels - model.rotary_dim
        self.dtype = config.params_dtype

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Return the rotations of a range of positions; megatron caches them by length."""
        positions = torch.arange(offset, offset + max_seq_len, device=self.inv_freq.device)
        return self.at(positions[None])

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the rotations at ``positions`` [b, s], in the dtype of the model.

        Returns:
            [s, b, 1, 1, kv_channels + rotary_dim / 2]: for each element of a head, the cosine of
            its angle, and 1 for elements that are not rotated; then the sines of all pairs. Cosines
            and sines are multiplied by the attention factor.
        """
        angles = positions.t()[:, :, None].float() * self.inv_freq  # [s, b, rotary_dim / 2]
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        rest = angles.new_ones(*angles.shape[:2], self.rest)
        rotations = torch.cat([cos, cos, rest, sin], dim=-1).to(self.dtype)
        return rotations[:, :, None, None, :]


class Rotation(torch.autograd.Function):
    """Rotate pairs of elements of queries or keys (Su et al. 2021, "RoFormer", equation 34).

    A pair is an element of the first half of the rotated elements, and the element of the second
    half at the same place. The backward pass rotates in the opposite direction.
    """

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Rotate ``heads`` [s, b, groups, n, head_dim] by ``rotations`` (:class:`RotaryPositions`).

        Returns:
            As ``heads``, contiguous.
        """
        ctx.save_for_backward(rotations)
        return _rotated(heads, rotations, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the heads."""
        (rotations,) = ctx.saved_tensors
        return _rotated(gradient, rotations, -1), None


def _rotated(heads: torch.Tensor, rotations: torch.Tensor, direction: int) -> torch.Tensor:
    head_dim = heads.size(-1)
    cos, sin = rotations[..., :head_dim], rotations[..., head_dim:]
    half = sin.size(-1)
    first, second = slice(half), slice(half, 2 * half)
    rotated = heads * cos
    rotated[..., first].addcmul_(heads[..., second], sin, value=-direction)
    rotated[..., second].addcmul_(heads[..., first], sin, value=direction)
    return rotated


class SequenceParallelLayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, with parameters marked as megatron expects.

    Under sequence parallelism each tensor-parallel rank normalizes its part of the sequence, so
    the gradients of weight and bias must be summed over those ranks; finalize_model_grads does so
    for parameters whose ``sequence_parallel`` is true. megatron's own wrapper of torch's norm
    raises an error under sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm that keeps its input and one float32 scale per row for the backward pass.

    On a GPU, torch's kernel does the same. On a CPU, torch composes RMSNorm of single operations,
    and keeps two float32 copies of the input as well.
    """

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Normalize ``states`` [..., h] in float32, and return their dtype."""
        dtype = torch.promote_types(states.dtype, torch.float32)
        raised = states.to(dtype)
        norm = torch.linalg.vector_norm(raised, dim=-1, keepdim=True)
        scale = torch.rsqrt(norm.square() / states.size(-1) + epsilon)
        ctx.save_for_backward(states, scale, weight)
        return (raised * scale).mul_(weight).to(states.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the gradients of ``states`` and ``weight``."""
        states, scale, weight = ctx.saved_tensors
        normalized, gradient = states * scale, gradient.to(scale.dtype)
        of_weight = (gradient * normalized).flatten(0, -2).sum(dim=0)
        gradient = gradient * weight
        along = torch.linalg.vecdot(gradient, normalized).unsqueeze(-1) / states.size(-1)
        of_states = gradient.addcmul_(normalized, along, value=-1).mul_(scale)
        return of_states.to(states.dtype), of_weight.to(weight.dtype), None


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with its parameter marked as in :class:`SequenceParallelLayerNorm`."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Normalize ``states`` [..., h]."""
        if states.is_cuda:
            return super().forward(states)
        normalized: torch.Tensor = RMSNormFunction.apply(states, self.weight, self.eps)
        return normalized


NORMS: dict[Normalization, type[torch.nn.Module]] = {
    "LayerNorm": SequenceParallelLayerNorm,
    "RMSNorm": SequenceParallelRMSNorm,
}


class SwiGLU(MegatronModule):
    """SwiGLU of the MLP (Shazeer 2020, "GLU Variants Improve Transformer", equation 6)."""

    def forward(self, product: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * input [s, b, f] of ``product`` [s, b, 2f], gates before inputs."""
        output: torch.Tensor = GatedSilu.apply(product)
        return output


class GatedSilu(torch.autograd.Function):
    """silu(gate) * input, which keeps only its argument for the backward pass.

    megatron keeps silu(gate) and a copy of the input, too.
    """

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor) -> torch.Tensor:
        """See :class:`SwiGLU`."""
        ctx.save_for_backward(product)
        gate, up = product.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient [s, b, 2f] of the product."""
        (product,) = ctx.saved_tensors
        gate, up = product.chunk(2, dim=-1)
        if torch.compiler.is_compiling():  # the compiler fuses, and cannot trace ``out``
            of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
            return torch.cat([of_gate, gradient * silu(gate)], dim=-1)
        of_product = torch.empty_like(product)
        of_gate, of_up = of_product.chunk(2, dim=-1)
        torch.mul(gradient, up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        torch.ops.aten.silu.out(gate, out=of_up).mul_(gradient)
        return of_product


class PlainMLP(MLP):
    """megatron's MLP with our products and activation.

    The layer's spec holds this class itself, which every release of megatron-core accepts: as a
    spec, it would have to be a ModuleSpec before 0.18, and a functools.partial from then on. The
    layer's own arguments differ between releases too, and repeat those that are set here.
    """

    def __init__(self, config: TransformerConfig, **_of_layer: Any) -> None:
        super().__init__(
            config,
            MLPSubmodules(
                linear_fc1=TraceableColumnParallelLinear,
                linear_fc2=GroupedRowParallelLinear,
                activation_func=SwiGLU if config.gated_linear_unit else None,
            ),
            ffn_hidden_size=config.ffn_hidden_size,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )


class RecomputedMLP(PlainMLP):
    """megatron's MLP, with activations recomputed from its input in the backward pass.

    This class uses torch's checkpoint function, because megatron's checkpoint function saves and
    restores random states, which the compiler cannot trace, and calls ``backward`` recursively,
    which hangs for an MLP that returns its bias. The MLP samples no random numbers: its output is
    dropped out by the layer.
    """

    def forward(self, *inputs: Any, **more: Any) -> Any:
        """Like megatron's."""
        return checkpoint(
            super().forward, *inputs, use_reentrant=False, preserve_rng_state=False, **more
        )
