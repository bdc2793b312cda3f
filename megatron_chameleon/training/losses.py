"""From the losses of a micro-batch's tokens to the loss that is trained on."""

from __future__ import annotations

import torch

from megatron_chameleon.blend.sampler import Batch

# What schedules take: a loss and what is kept of it, with the number of tokens between the two
# where the loss is a sum over them.
Loss = tuple[torch.Tensor, Batch] | tuple[torch.Tensor, torch.Tensor, Batch]


def mean_loss(
    batch: Batch,
    token_losses: torch.Tensor,
    num_domains: int,
    loss_weights: torch.Tensor | None = None,
) -> Loss:
    """Mean over the micro-batch's tokens, and sums per domain for the log.

    Every window is full, so the mean of the micro-batches' means is the global batch's mean.

    Args:
        batch: a micro-batch, with loss_mask [b, s] and domain [b].
        token_losses: [b, s].
        num_domains: domains that samples are numbered by (k).
        loss_weights: [k] what a token's loss counts in the mean, by its domain; by default 1. The
            sums for the log are of the losses themselves.
    """
    masked = token_losses.float() * batch["loss_mask"]  # [b, s]
    sums = domain_sums(batch, num_domains, masked)
    loss = weighted(masked, batch, loss_weights).sum() / batch["loss_mask"].sum()
    return loss, {"domain_sums": sums}


def summed_loss(
    batch: Batch,
    token_losses: torch.Tensor,
    num_domains: int,
    loss_weights: torch.Tensor | None = None,
) -> Loss:
    """Sum over the micro-batch's tokens, how many they are, and sums per domain for the log.

    Megatron divides the gradient by the tokens of all micro-batches and data-parallel ranks. A
    micro-batch, and even a step, may have none. The arguments are those of :func:`mean_loss`.
    """
    masked = token_losses.float() * batch["loss_mask"]  # [b, s]
    sums = domain_sums(batch, num_domains, masked)
    num_tokens = batch["loss_mask"].sum().to(torch.int32)
    return weighted(masked, batch, loss_weights).sum(), num_tokens, {"domain_sums": sums}


def weighted(losses: torch.Tensor, batch: Batch, loss_weights: torch.Tensor | None) -> torch.Tensor:
    """Losses [b, s], each times the weight of its sample's domain."""
    if loss_weights is None:
        return losses
    return losses * loss_weights.to(losses)[batch["domain"]][:, None]


def domain_sums(batch: Batch, num_domains: int, masked: torch.Tensor) -> torch.Tensor:
    """[k, 3] float64 of the losses [b, s]: summed loss, tokens with one and tokens drawn."""
    counted = batch["loss_mask"].sum(1, dtype=torch.float64)
    drawn = torch.full_like(counted, masked.size(1))
    parts = torch.stack([masked.detach().sum(1, dtype=torch.float64), counted, drawn], dim=1)
    sums = torch.zeros(num_domains, 3, dtype=torch.float64, device=masked.device)
    return sums.index_add_(0, batch["domain"], parts)
