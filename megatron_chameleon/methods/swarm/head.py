"""The output layer and its cross entropy for stacked members, a piece of the logits at a time.

With 50,304 tokens and vectors of 256, the output layer has over 85% of a small proxy's operations,
and its logits are hundreds of times as large as its hidden states. So they exist for a few rows at
a time: a piece's logits are computed, its losses taken, its gradient is written over the logits and
multiplied out, all before the next piece. What each token counts in the loss is known beforehand,
so nothing is computed again in a backward pass:

    logits = x W^T,  g = scale * (softmax(logits) - one hot label),  dx = g W,  dW += g^T x
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy

from megatron_chameleon.model.cross_entropy import log_sum_exp, write_gradient

# Elements of the logits that exist at a time: products of a thousand rows on a CPU, in 256 MB; on a
# GPU of ten thousand, which fill it whatever their shape, in 1 GB of bfloat16.
PIECE_ON_CPU, PIECE_ON_GPU = 1 << 26, 1 << 29


@torch.no_grad()
def losses_of(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Losses [E, n] float32, in nats.

    Args:
        hidden: [E, n, h].
        weight: [E, v, h]; rows from ``vocab_size`` on only pad.
        labels: [E, n] int64.
        vocab_size: tokens there are.
    """
    losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
    for members, rows in _pieces(labels, weight.size(1)):
        logits = _logits(hidden[members, rows], weight[members])
        losses[members, rows], _ = _losses(logits, labels[members, rows], vocab_size)
    return losses


@torch.no_grad()
def losses_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    scale: float,
    weight_gradient: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`losses_of`, and the gradients of ``scale`` times the sum of the losses.

    Args:
        hidden: [E, n, h].
        weight: [E, v, h]; rows from ``vocab_size`` on only pad, and have no gradient.
        labels: [E, n] int64.
        vocab_size: tokens there are.
        scale: what each token counts.
        weight_gradient: [E, v, h] float32, to which that of ``weight`` is added.

    Returns:
        losses [E, n] float32, without ``scale``, and the gradient of ``hidden``.
    """
    losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
    of_hidden = torch.empty_like(hidden)
    scales = torch.full((labels.numel(),), scale, dtype=torch.float32, device=hidden.device)
    for members, rows in _pieces(labels, weight.size(1)):
        x, own = hidden[members, rows], labels[members, rows]
        logits = _logits(x, weight[members])
        losses[members, rows], denominator = _losses(logits, own, vocab_size)
        flat = logits.view(-1, logits.size(-1))
        write_gradient(
            flat, own.flatten(), denominator, scales[: own.numel()], vocab_size, out=flat
        )
        of_hidden[members, rows] = torch.bmm(logits, weight[members])
        _add_products(weight_gradient[members], logits, x)
    return losses, of_hidden


def plain_losses(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """What the functions above compute, with all logits at once and by autograd: the reference."""
    logits = hidden @ weight[:, :vocab_size].transpose(1, 2)  # [E, n, v]
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )


def _pieces(labels: torch.Tensor, columns: int) -> Iterator[tuple[slice, slice]]:
    """Members and rows of [E, n] ``labels``: several members whole, or rows of one."""
    members, rows = labels.shape
    elements = PIECE_ON_CPU if labels.device.type == "cpu" else PIECE_ON_GPU
    height = min(rows, max(1, elements // columns))
    depth = max(1, elements // (height * columns)) if height == rows else 1
    for first in range(0, members, depth):
        for row in range(0, rows, height):
            yield slice(first, first + depth), slice(row, row + height)


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[e, n, v] of ``x`` [e, n, h]."""
    return torch.bmm(x, weight.transpose(1, 2))


def _losses(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [e, n] of ``labels`` [e, n], and [e * n] logarithms of the softmax's denominators."""
    rows = logits.view(-1, logits.size(-1))
    denominator = log_sum_exp(rows, vocab_size)
    predicted = rows.gather(1, labels.reshape(-1, 1)).squeeze(1).float()
    return (denominator - predicted).view(labels.shape), denominator


def _add_products(target: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor) -> None:
    """Add gradient^T x to ``target`` [e, v, h] float32, for [e, n, v] and [e, n, h]."""
    if gradient.dtype == target.dtype:
        target.baddbmm_(gradient.transpose(1, 2), x)
    else:  # summed over the piece's rows in float32 and then rounded, as for a micro-batch of a run
        target.add_(torch.bmm(gradient.transpose(1, 2), x))
