"""Core attention over torch's scaled_dot_product_attention (flash, cuDNN or CPU kernels)."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import pad, scaled_dot_product_attention

# Flash attention takes head dimensions that are multiples of 8. torch would pad others itself, but
# for one of its kernels alone.
HEAD_DIM_MULTIPLE_ON_GPU = 8


class SDPACoreAttention(MegatronModule):
    """Attention of already projected heads, in place of megatron's unfused DotProductAttention.

    It never holds the s x s scores. A boolean mask is honoured; what it cannot do is refused
    when it is made or called, not ignored.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        assert dropout == 0.0, "attention dropout is not supported here"
        assert config.context_parallel_size == 1, "context parallelism needs Transformer Engine"
        assert config.window_size is None, "sliding windows are not supported here"
        assert config.softmax_type == "vanilla", "only the plain softmax is supported here"
        assert attention_type == "self"
        self.attn_mask_type = attn_mask_type
        # Of the real head dimension, also where heads are padded.
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
        """Attend.

        Args:
            query: [s, b, heads, head_dim].
            key: [s, b, groups, head_dim].
            value: [s, b, groups, head_dim].
            attention_mask: None for the causal mask of ``attn_mask_type``; else the only mask,
                broadcastable to [b, heads, s, s]: boolean, True where attention is NOT allowed
                (megatron's convention), or what :func:`additive_mask` makes of it, in the dtype of
                ``query``, which is quicker where several layers share it.
            attn_mask_type: in place of the one given to the constructor.
            attention_bias: must be None.
            packed_seq_params: must be None.

        Returns:
            [s, b, heads * head_dim].
        """
        assert attention_bias is None, "an attention bias is not supported here"
        assert packed_seq_params is None, "packed sequences need Transformer Engine"
        padding = -query.size(-1) % self.head_dim_multiple
        q, k, v = (  # [b, n, s, d]
            _padded(heads, padding).permute(1, 2, 0, 3) for heads in (query, key, value)
        )
        mask_type = attn_mask_type or self.attn_mask_type
        if attention_mask is None:
            assert mask_type in (AttnMaskType.causal, AttnMaskType.no_mask), mask_type
        elif attention_mask.dtype == torch.bool:
            attention_mask = ~attention_mask
        context = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attention_mask,
            is_causal=attention_mask is None and mask_type == AttnMaskType.causal,
            scale=self.softmax_scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        context = context[..., : query.size(-1)]
        return context.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``mask`` as it is added to scores: 0 where attention is allowed, else minus infinity.

    torch's kernels make the same of a boolean mask, but anew in every layer, and keep each for the
    backward pass.

    Args:
        mask: boolean, True where attention is NOT allowed (megatron's convention).
        dtype: of the queries.
    """
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _padded(heads: torch.Tensor, padding: int) -> torch.Tensor:
    """Zeros behind each head: they add nothing to scores, and come out as zeros."""
    return pad(heads, (0, padding)) if padding else heads
