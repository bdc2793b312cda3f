"""What flex attention computes of a block mask, with torch's plain operations."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention


def visible_pairs(mask: BlockMask) -> torch.Tensor:
    """Return which keys each query sees: [b, 1, s, s] bool.

    As in the kernels, the mask's function decides within partly visible blocks only.
    """
    length, device = mask.seq_lengths[0], mask.kv_num_blocks.device

    def in_blocks(numbers: torch.Tensor | None, lists: torch.Tensor | None) -> torch.Tensor:
        assert numbers is not None
        assert lists is not None
        count = lists.size(-1)
        is_listed = torch.arange(count, device=device) < numbers[..., None]
        blocks = torch.zeros_like(is_listed).scatter(-1, lists.long(), is_listed)
        block = torch.arange(length, device=device) // mask.BLOCK_SIZE[0]
        return blocks[..., block, :][..., block]

    sample = torch.arange(mask.kv_num_blocks.size(0), device=device)[:, None, None, None]
    token = torch.arange(length, device=device)
    within = mask.mask_mod(sample, sample, token[:, None], token)
    partly = in_blocks(mask.kv_num_blocks, mask.kv_indices)
    return in_blocks(mask.full_kv_num_blocks, mask.full_kv_indices) | partly & within


def attention_of_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
) -> torch.Tensor:
    """Compute torch's flex_attention of ``query`` [b, n, s, d], differentiably on every device."""
    visible = visible_pairs(block_mask)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scale, enable_gqa=enable_gqa
    )
