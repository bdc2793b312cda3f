"""Positions and masks at the ends of documents, against megatron.core's own function."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from megatron_chameleon.blend.boundaries import document_boundaries, document_mask
from megatron_chameleon.blend.options import DocumentBoundaryOptions

EOD = 3
OPTIONS = st.builds(DocumentBoundaryOptions, st.booleans(), st.booleans(), st.booleans())


def reference(tokens, options):
    """Megatron's position ids, loss mask and attention mask, sample by sample."""
    samples = [
        _get_ltor_masks_and_position_ids(
            sample,
            EOD,
            options.reset_position_ids,
            options.reset_attention_mask,
            options.eod_mask_loss,
            create_attention_mask=True,
        )
        for sample in tokens
    ]
    return [torch.stack(parts) for parts in zip(*samples, strict=True)]


@settings(max_examples=200)
@given(OPTIONS, st.data())
def test_positions_and_masks_match_megatron(options, data):
    batch, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 24))
    # One token in four ends a document: some are empty, and some samples have no end.
    rows = st.lists(st.integers(0, EOD), min_size=length + 1, max_size=length + 1)
    windows = torch.tensor(data.draw(st.lists(rows, min_size=batch, max_size=batch)))
    tokens, kept = windows[:, :-1], windows.clone()
    made = document_boundaries(tokens, EOD, options)
    assert torch.equal(windows, kept)
    mask, losses, positions = reference(tokens, options)
    starts = made.get("document_starts")
    causal = torch.ones(length, length).triu(1).bool().expand(batch, 1, length, length)
    assert torch.equal(causal if starts is None else document_mask(starts), mask)
    for name, expected in (("loss_mask", losses), ("position_ids", positions)):
        assert made[name].dtype == expected.dtype
        assert torch.equal(made[name], expected), name
