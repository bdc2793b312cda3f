"""What the end of a document does within a sample that holds several, by Megatron's options."""

from __future__ import annotations

import dataclasses

import torch

from megatron_chameleon.options.training import DocumentBoundaryOptions


@dataclasses.dataclass(frozen=True)
class DocumentBoundaries:
    """Positions and masks of a batch of samples.

    They are those of megatron.core's ``_get_ltor_masks_and_position_ids``, which makes them sample
    by sample. A document ends with its end-of-document token, which still belongs to it.

    Attributes:
        eod_id: the end-of-document token.
        options: what becomes of it.
    """

    eod_id: int
    options: DocumentBoundaryOptions = dataclasses.field(default_factory=DocumentBoundaryOptions)

    def __call__(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a batch holds beside its tokens, [b, s] int64.

        Returns:
            position_ids [b, s] int64; loss_mask [b, s] float32, 0 where nothing is learnt; and with
            ``reset_attention_mask`` document_starts [b, s] int64, of which :func:`document_mask`
            makes the attention mask. That is s times as large, so it is best made where it is used.
            Without it the plain causal mask holds, for which attention needs no tensor.
        """
        options, device = self.options, tokens.device
        made = {
            # Expanded: it is the same for every sample, and takes no time to fill.
            "position_ids": torch.arange(tokens.size(1), device=device).expand(tokens.shape),
            "loss_mask": torch.ones(tokens.shape, device=device),
        }
        if options == DocumentBoundaryOptions():
            return made
        is_eod = tokens == self.eod_id
        starts = document_starts(is_eod)
        if options.reset_position_ids:
            made["position_ids"] = made["position_ids"] - starts
        if options.eod_mask_loss:
            made["loss_mask"] = (~is_eod).float()
        if options.reset_attention_mask:
            made["document_starts"] = starts
        return made


def document_starts(is_eod: torch.Tensor) -> torch.Tensor:
    """Where each token's document begins in its sample, [b, s] int64.

    Args:
        is_eod: [b, s] bool, whether a token ends its document.
    """
    positions = torch.arange(is_eod.size(1), device=is_eod.device)
    begins = torch.zeros_like(is_eod, dtype=torch.int64)
    begins[:, 1:] = torch.where(is_eod[:, :-1], positions[1:], 0)
    return begins.cummax(dim=1).values


def document_mask(starts: torch.Tensor) -> torch.Tensor:
    """Causal attention within documents, [b, 1, s, s] bool, True where it is not allowed.

    Args:
        starts: [b, s] int64, where each token's document begins.
    """
    seen = torch.arange(starts.size(1), device=starts.device)
    later = seen[None, :] > seen[:, None]  # [s, s]
    return (seen < starts[:, :, None]).logical_or_(later)[:, None]
