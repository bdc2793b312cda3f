"""Position ids and masks at document boundaries, as selected by Megatron's options."""

from __future__ import annotations

import torch

from megatron_chameleon.blend.options import DocumentBoundaryOptions


def document_boundaries(
    tokens: torch.Tensor, eod_id: int, options: DocumentBoundaryOptions
) -> dict[str, torch.Tensor]:
    """Compute position ids and masks of a batch of samples.

    The results equal those of megatron.core's ``_get_ltor_masks_and_position_ids``, which processes
    one sample at a time. The end-of-document token belongs to the document that it ends.

    Args:
        tokens: [b, s] int64.
        eod_id: the end-of-document token.
        options: what is reset or masked at document boundaries.

    Returns:
        position_ids [b, s] int64; loss_mask [b, s] float32, 0 for tokens without loss; and, with
        ``reset_attention_mask``, document_starts [b, s] int64. The attention mask would be s times
        as large as document_starts, so it is not returned: :func:`document_mask` computes it where
        attention needs it. Without document_starts, attention is causal and needs no mask tensor.
    """
    made = {
        # All samples have the same positions, so an expanded view avoids copies.
        "position_ids": torch.arange(tokens.size(1), device=tokens.device).expand(tokens.shape),
        "loss_mask": torch.ones(tokens.shape, device=tokens.device),
    }
    if options == DocumentBoundaryOptions():
        return made
    is_eod = tokens == eod_id
    starts = document_starts(is_eod)
    if options.reset_position_ids:
        made["position_ids"] = made["position_ids"] - starts
    if options.eod_mask_loss:
        made["loss_mask"] = (~is_eod).float()
    if options.reset_attention_mask:
        made["document_starts"] = starts
    return made


def document_starts(is_eod: torch.Tensor) -> torch.Tensor:
    """Return the position in the sample where each token's document begins, [b, s] int64.

    Args:
        is_eod: [b, s] bool, whether a token is the end of its document.
    """
    positions = torch.arange(is_eod.size(1), device=is_eod.device)
    begins = torch.zeros_like(is_eod, dtype=torch.int64)
    begins[:, 1:] = torch.where(is_eod[:, :-1], positions[1:], 0)
    return begins.cummax(dim=1).values


def document_mask(starts: torch.Tensor) -> torch.Tensor:
    """Return the mask of causal attention within documents, [b, 1, s, s] bool; True is masked.

    Args:
        starts: [b, s] int64, from :func:`document_starts`.
    """
    seen = torch.arange(starts.size(1), device=starts.device)
    later = seen[None, :] > seen[:, None]  # [s, s]
    return (seen < starts[:, :, None]).logical_or_(later)[:, None]
