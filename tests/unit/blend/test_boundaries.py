"""Positions and masks at the ends of documents, against megatron.core's own function."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from megatron_chameleon.blend.boundaries import DocumentBoundaries, document_mask
from megatron_chameleon.blend.options import DocumentBoundaryOptions

EOD = 3
ALL_OPTIONS = [DocumentBoundaryOptions(*on) for on in itertools.product((False, True), repeat=3)]


def reference(tokens: torch.Tensor, options: DocumentBoundaryOptions) -> dict[str, torch.Tensor]:
    """Megatron's masks and positions, sample by sample, and what its plain mask would be."""
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
    masks, losses, positions = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return {"position_ids": positions, "loss_mask": losses, "attention_mask": masks}


def ours(tokens: torch.Tensor, options: DocumentBoundaryOptions) -> dict[str, torch.Tensor]:
    """The same from the code under test, with the mask that attention makes for itself."""
    made = DocumentBoundaries(EOD, options)(tokens)
    starts = made.pop("document_starts", None)
    length = tokens.size(1)
    causal = torch.ones(length, length).triu(1).bool().expand(len(tokens), 1, length, length)
    return {**made, "attention_mask": causal if starts is None else document_mask(starts)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, part in expected.items():
        assert found[name].dtype == part.dtype, name
        assert torch.equal(found[name], part), name


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@given(data=st.data())
def test_positions_and_masks_are_megatrons(options, data):
    batch, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 24))
    # One token in four ends a document: some are empty, and some samples have no end.
    rows = st.lists(st.integers(0, EOD), min_size=length, max_size=length)
    tokens = torch.tensor(data.draw(st.lists(rows, min_size=batch, max_size=batch)))
    assert_same(ours(tokens, options), reference(tokens, options))


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_tokens_may_be_a_view_and_are_unchanged(options):
    windows = torch.randint(0, EOD + 1, (3, 65), generator=torch.Generator().manual_seed(0))
    kept = windows.clone()
    assert_same(ours(windows[:, :-1], options), reference(windows[:, :-1], options))
    assert torch.equal(windows, kept)


def test_boundaries_of_a_hand_made_example():
    tokens = torch.tensor([[5, 6, EOD, 7, EOD, EOD, 8]])
    made = DocumentBoundaries(EOD, DocumentBoundaryOptions(True, True, True))(tokens)
    assert made["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert made["loss_mask"].tolist() == [[1, 1, 0, 1, 0, 0, 1]]
    seen = (~document_mask(made["document_starts"]))[0, 0]
    assert [row.nonzero().flatten().tolist() for row in seen] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [3],
        [3, 4],
        [5],
        [6],
    ]
