"""Attention on a GPU equals float64 on the CPU, with padded head dimensions and with masks."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_chameleon.blend.boundaries import document_mask, document_starts
from megatron_chameleon.model.document_attention import document_blocks
from megatron_chameleon.model.layers import SDPACoreAttention, additive_mask

LENGTH, BATCH, HEADS = 200, 3, 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def starts() -> torch.Tensor:
    """Document starts [b, s] of samples of several documents."""
    ends = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.02
    return document_starts(ends)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [48, 50, 64])
@pytest.mark.parametrize("masked", ["causal", "boolean", "additive", "flex"])
def test_outputs_and_gradients_are_those_of_the_cpu(
    head_dim: int, masked: str, dtype: torch.dtype
) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * head_dim,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        cuda_graph_scope=[],
    )
    attention = SDPACoreAttention(config, 1, AttnMaskType.causal, "self")
    generator = torch.Generator().manual_seed(0)
    # Flex attention is also tested with grouped queries.
    groups = HEADS // 2 if masked == "flex" else HEADS
    values = [
        torch.randn(LENGTH, BATCH, heads, head_dim, generator=generator).to(dtype)
        for heads in (HEADS, groups, groups, HEADS)
    ]

    def computed(device: str, precision: torch.dtype) -> list[torch.Tensor]:
        leaves = [part.to(device, precision).requires_grad_() for part in values[:3]]
        mask = None if masked == "causal" else document_mask(starts().to(device))
        if masked == "additive" and mask is not None:
            mask = additive_mask(mask, precision)
        if masked == "flex" and device == "cuda":
            mask = document_blocks(starts().to(device))
        out = attention(*leaves, mask)
        out.backward(values[3].to(device, precision).view_as(out))
        return [out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)]

    for found, expected in zip(
        computed("cuda", dtype), computed("cpu", torch.float64), strict=True
    ):
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=1e-2)
