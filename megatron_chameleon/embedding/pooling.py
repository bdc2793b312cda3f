"""Mean pooling of hidden states over the tokens of each window, without padding."""

from __future__ import annotations

import dataclasses

import torch

from megatron_chameleon.parallel.triton_probe import has_kernels


@dataclasses.dataclass(frozen=True)
class FinalNorm:
    """LayerNorm or RMSNorm of every hidden state before the mean.

    Attributes:
        weight: [h], any floating dtype.
        bias: [h], any floating dtype; None for RMSNorm, which neither subtracts the mean nor adds a
            bias.
        epsilon: added to the variance, or to the mean square.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    epsilon: float = dataclasses.field(default=1e-5, kw_only=True)

    def plain(self, states: torch.Tensor) -> torch.Tensor:
        """Normalize ``states`` [..., h] with torch's functions, in the dtype of ``states``."""
        weight, shape = self.weight.to(states), states.shape[-1:]
        if self.bias is None:
            return torch.nn.functional.rms_norm(states, shape, weight, self.epsilon)
        bias = self.bias.to(states)
        return torch.nn.functional.layer_norm(states, shape, weight, bias, self.epsilon)


def masked_mean(
    hidden_states: torch.Tensor, lengths: torch.Tensor, norm: FinalNorm | None = None
) -> torch.Tensor:
    """Average the first ``lengths`` positions of each sequence, in one pass.

    Padding is ignored even if it is NaN or infinite; a sequence of length 0 yields zero. On CUDA
    devices Triton kernels compute the mean, with deterministic float32 sums; on other devices, and
    where Triton cannot launch kernels, :func:`plain_masked_mean` computes it.

    Args:
        hidden_states: [s, b, h] bfloat16, float16 or float32.
        lengths: [b] integers: number of valid positions of each sequence.
        norm: applied to the hidden states first. Since the mean is linear, its weight and bias are
            applied once, to the mean of the normalized states.

    Returns:
        [b, h] in float32.

    Raises:
        ValueError: if ``lengths`` has another shape.
    """
    size, rows = hidden_states.shape[:2]
    if lengths.shape != (rows,):
        raise ValueError(f"lengths have shape {tuple(lengths.shape)}; must be [{rows}]")
    lengths = lengths.to(torch.int64).clamp(0, size)
    if not has_kernels(hidden_states):
        valid = torch.arange(size, device=hidden_states.device)[:, None] < lengths
        return plain_masked_mean(hidden_states, valid, norm).float()
    from megatron_chameleon.embedding.pooling_kernels import launch_masked_mean

    states = hidden_states if hidden_states.stride(2) == 1 else hidden_states.contiguous()
    return launch_masked_mean(states, lengths, norm)


def plain_masked_mean(
    hidden_states: torch.Tensor, valid: torch.Tensor, norm: FinalNorm | None = None
) -> torch.Tensor:
    """:func:`masked_mean` of [s, b, h] in plain torch, in float32 or float64.

    ``valid`` [s, b] is bool.
    """
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    states = torch.where(valid[:, :, None], hidden_states.to(dtype), 0.0)
    if norm is not None:
        states = torch.where(valid[:, :, None], norm.plain(states), 0.0)
    return states.sum(dim=0) / valid.sum(dim=0).clamp(min=1)[:, None]
