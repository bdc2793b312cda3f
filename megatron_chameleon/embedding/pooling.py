"""Masked mean pooling of hidden states over the tokens of each window."""

from __future__ import annotations

import torch


def masked_mean(hidden_states: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Mean over the first ``lengths[b]`` positions of each sequence.

    What padding holds never enters, NaN and infinity included; length 0 gives zero.

    Args:
        hidden_states: [s, b, h], any floating dtype.
        lengths: [b] int64.

    Returns:
        [b, h] in float32.
    """
    positions = torch.arange(hidden_states.size(0), device=hidden_states.device)
    valid = positions[:, None] < lengths[None, :]  # [s, b]
    kept = torch.where(valid[:, :, None], hidden_states.float(), 0.0)
    return kept.sum(dim=0) / lengths.clamp(min=1)[:, None]
