"""Masked mean pooling of hidden states over the tokens of each window."""

from __future__ import annotations

import dataclasses

import torch

from megatron_chameleon.parallel.triton_probe import has_kernels


@dataclasses.dataclass(frozen=True)
class FinalNorm:
    """The layer norm that is applied to every hidden state before the mean.

    Attributes:
        weight: [h], any floating dtype.
        bias: [h], the same.
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
    """Mean over the valid positions of each sequence, in one read of them.

    What padding holds never enters, NaN and infinity included; a sequence without a valid position
    gives zero. On CUDA devices Triton kernels compute it, with float32 sums in an order that does
    not change from run to run; elsewhere, and where Triton cannot launch kernels, it is
    :func:`plain_masked_mean`.

    Args:
        hidden_states: [s, b, h], or [b, s, h] if ``batch_first``; bfloat16, float16 or float32.
        lengths: [b] integers; the first so many positions of each sequence are valid.
        mask: [b, s], nonzero where a position is valid; this or ``lengths`` is given.
        batch_first: the order of the first two dimensions.
        norm: applied to the hidden states before they are averaged. Since the mean is linear, its
            weight and bias are applied once, to the mean of the normalised states.

    Returns:
        [b, h] in float32.

    Raises:
        ValueError: if none or both of ``lengths`` and ``mask`` are given, or their shape is not
            that of the hidden states.
    """
    states = hidden_states.transpose(0, 1) if batch_first else hidden_states
    mask = _checked(states, lengths, mask)
    if not has_kernels(states):
        return plain_masked_mean(states, _valid(states, lengths, mask), norm).float()
    from megatron_chameleon.embedding.pooling_kernels import launch_masked_mean

    return launch_masked_mean(
        states if states.stride(2) == 1 else states.contiguous(),
        _counts(states, lengths, mask),
        mask,
        None if norm is None else norm.weight.contiguous(),
        None if norm is None else norm.bias.contiguous(),
        0.0 if norm is None else norm.epsilon,
    )


def plain_masked_mean(
    hidden_states: torch.Tensor, valid: torch.Tensor, norm: FinalNorm | None = None
) -> torch.Tensor:
    """:func:`masked_mean` of [s, b, h] by torch's own operations, in float32 or float64.

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


def _checked(
    states: torch.Tensor, lengths: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor | None:
    """``mask`` as bool, contiguous."""
    if (lengths is None) == (mask is None):
        raise ValueError("give either lengths or a mask")
    length, rows = states.shape[:2]
    if lengths is not None and lengths.shape != (rows,):
        raise ValueError(f"lengths are {tuple(lengths.shape)}; for these states they are [{rows}]")
    if mask is not None and mask.shape != (rows, length):
        raise ValueError(f"the mask is {tuple(mask.shape)}; it has to be [{rows}, {length}]")
    return None if mask is None else (mask != 0).contiguous()


def _valid(
    states: torch.Tensor, lengths: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """[s, b] bool."""
    if mask is not None:
        return mask.t()
    assert lengths is not None
    positions = torch.arange(states.size(0), device=states.device)
    return positions[:, None] < lengths[None, :]


def _counts(
    states: torch.Tensor, lengths: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """[b] int64."""
    if mask is not None:
        return mask.sum(dim=1)
    assert lengths is not None
    return lengths.to(torch.int64).clamp(0, states.size(0))
