"""Masked mean pooling of hidden states over the tokens of each window."""

from __future__ import annotations

import dataclasses

import torch

from megatron_chameleon.parallel.triton_probe import has_kernels


@dataclasses.dataclass(frozen=True)
class FinalNorm:
    """Layer norm of every hidden state before the mean.

    Attributes:
        weight: [h], any floating dtype.
        bias: [h], any floating dtype.
        epsilon: added to the variance.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    epsilon: float = 1e-5


def masked_mean(
    hidden_states: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    batch_first: bool = False,
    norm: FinalNorm | None = None,
) -> torch.Tensor:
    """Mean over the valid positions of each sequence, in one pass over the hidden states.

    Padding is never read as a value, not even NaN or infinity; a sequence without a valid position
    yields zero. On CUDA devices Triton kernels compute it, with deterministic float32 sums;
    elsewhere, and where Triton cannot launch kernels, :func:`plain_masked_mean`.

    Args:
        hidden_states: [s, b, h], or [b, s, h] if ``batch_first``; bfloat16, float16 or float32.
        lengths: [b] integers: number of leading valid positions of each sequence.
        mask: [b, s], nonzero at valid positions; pass either this or ``lengths``.
        batch_first: the order of the first two dimensions.
        norm: applied to the hidden states first. Since the mean is linear, its weight and bias are
            applied once, to the mean of the normalized states.

    Returns:
        [b, h] in float32.

    Raises:
        ValueError: unless exactly one of ``lengths`` and ``mask`` is passed, in the right shape.
    """
    states = hidden_states.transpose(0, 1) if batch_first else hidden_states
    size, rows = states.shape[:2]
    if (lengths is None) == (mask is None):
        raise ValueError("pass either lengths or a mask")
    if mask is not None:
        if mask.shape != (rows, size):
            raise ValueError(f"mask has shape {tuple(mask.shape)}; must be [{rows}, {size}]")
        mask = (mask != 0).contiguous()
        counts = mask.sum(dim=1)
    else:
        assert lengths is not None
        if lengths.shape != (rows,):
            raise ValueError(f"lengths have shape {tuple(lengths.shape)}; must be [{rows}]")
        counts = lengths.to(torch.int64).clamp(0, size)
    if not has_kernels(states):
        if mask is None:
            mask = torch.arange(size, device=states.device) < counts[:, None]
        return plain_masked_mean(states, mask.t(), norm).float()
    from megatron_chameleon.embedding.pooling_kernels import launch_masked_mean

    states = states if states.stride(2) == 1 else states.contiguous()
    return launch_masked_mean(states, counts, mask, norm)


def plain_masked_mean(
    hidden_states: torch.Tensor, valid: torch.Tensor, norm: FinalNorm | None = None
) -> torch.Tensor:
    """:func:`masked_mean` of [s, b, h] in plain torch, in float32 or float64.

    ``valid`` [s, b] is bool.
    """
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    states = torch.where(valid[:, :, None], hidden_states.to(dtype), 0.0)
    if norm is not None:
        states = torch.nn.functional.layer_norm(
            states, states.shape[2:], norm.weight.to(dtype), norm.bias.to(dtype), norm.epsilon
        )
        states = torch.where(valid[:, :, None], states, 0.0)
    return states.sum(dim=0) / valid.sum(dim=0).clamp(min=1)[:, None]
