"""Sums of losses are those of every scored token, whatever the batches, ranks and protocol."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from megatron_chameleon.artifacts import Protocol
from megatron_chameleon.evaluation.held_out import choose_windows, held_out_text, reading_flops
from megatron_chameleon.evaluation.perplexity import (
    ClusterMap,
    batches,
    cluster_losses,
)
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.model.sizes import ModelShape, model_size
from tests.unit.evaluation.plain_protocol import (
    DOCUMENTS,
    EOD,
    predictions,
    protocols,
    token_file,
)

SHAPE = ModelShape(model_size("nano"), vocab_size=250, max_sequence_length=32)


@dataclasses.dataclass
class LabelReader:
    """In place of a model: the loss of a token is a number that stands for it alone."""

    data_rank: int = 0
    data_size: int = 1
    speaks: bool = True

    @property
    def layout(self) -> Any:
        return SimpleNamespace(
            data_rank=self.data_rank,
            data_size=self.data_size,
            tensor_size=2,
            sequence_parallel=False,
            device=torch.device("cpu"),
            is_last_stage=self.speaks,
        )

    def token_losses(self, tokens, labels):
        return torch.sqrt(labels.float() + 2) if self.speaks else None

    def sum_over_ranks(self, values, *, spoken):
        assert spoken == self.speaks
        return values


def sums_of(reader, tokens, text, batch_size):
    with tqdm(total=text.num_predictions, disable=True) as progress:
        updates: list[int] = []
        progress.update = updates.append
        sums = cluster_losses(reader, text, ClusterMap.of(tokens, text), batch_size, progress)
    assert sum(updates) == text.num_predictions  # the bar ends where it should
    return sums


@given(DOCUMENTS, protocols(), st.integers(1, 7), st.integers(1, 4))
def test_ranks_share_the_batches_and_each_document_gets_its_tokens(
    documents, protocol, batch_size, data_size
):
    tokens = token_file(documents)
    text = held_out_text(tokens, protocol, EOD)
    if text is None:
        return
    parts = [
        sums_of(LabelReader(rank, data_size), tokens, text, batch_size) for rank in range(data_size)
    ]
    expected = np.zeros(len(documents))
    for one in predictions(documents, protocol):
        expected[one.document] += np.sqrt(np.float32(one.label + 2))
    found = np.sum(parts, axis=0)
    assert found[found > 0] == pytest.approx(expected[expected > 0], rel=1e-12)


def test_short_windows_go_together_and_no_batch_is_wider_than_it_must_be():
    documents = [[1] * length for length in (3, 16, 5, 40, 1)]
    protocol = Protocol("test", 16, packing="documents", first_token="after-eod")
    text = held_out_text(token_file(documents), protocol, EOD)
    assert text is not None
    ordered = text.longest_first()
    assert ordered.windows.lengths.tolist() == [16, 16, 16, 8, 5, 3, 1]
    assert list(batches(ordered, 2)) == [(0, 2, 16), (2, 4, 16), (4, 7, 5)]
    assert list(batches(ordered, 1)) == [
        (0, 1, 16),
        (1, 2, 16),
        (2, 3, 16),
        (3, 5, 8),
        (5, 7, 3),
    ]
    assert [width for *_, width in batches(ordered, 2, multiple=4)] == [16, 16, 8]


def test_windows_cost_what_their_own_lengths_cost():
    text = choose_windows(np.zeros(2 * 16 + 5 + 1, np.uint16), 16, overlap=0)
    expected = 2 * forward_flops(SHAPE, 16, 16) + forward_flops(SHAPE, 5, 5)
    assert reading_flops(SHAPE, text) == expected
    assert expected != forward_flops(SHAPE, 37, 16)


@pytest.fixture(scope="module")
def reader(one_rank):
    model = build_model(SHAPE, one_rank, seed=3)
    model.eval()
    return Reader(model, SHAPE, one_rank)


def loss_of(reader: Reader, context: tuple[int, ...], label: int) -> float:
    """Of one token, by the logits of its own context alone, its softmax in float64."""
    tokens = torch.tensor([context])
    with torch.no_grad():
        logits = reader.model(tokens, torch.arange(len(context))[None], None)
    return -float(logits[0, -1, : SHAPE.vocab_size].double().log_softmax(-1)[label])


PROTOCOLS = [
    Protocol("test", 32),
    Protocol("test", 13, overlap=5),
    Protocol("test", 32, end_of_document=False),
    Protocol("test", 32, packing="documents", first_token="after-eod"),
    Protocol("test", 16, packing="documents", overlap=15),
    Protocol("test", 9, packing="documents", overlap=4, first_token="after-eod"),
    Protocol("test", 32, packing="documents", end_of_document=False, first_token="after-eod"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: f"{p.packing}-{p.window_length}")
def test_a_real_models_sums_are_those_of_every_token_by_itself(reader, protocol):
    rng = np.random.default_rng(protocol.window_length)
    lengths = (1, 50, 2, 0, 33, 7)
    documents = [[*rng.integers(10, 250, n - 1).tolist(), EOD] if n else [] for n in lengths]
    expected = np.zeros(len(documents))
    for one in predictions(documents, protocol):
        expected[one.document] += loss_of(reader, one.context, one.label)
    tokens = token_file(documents)
    text = held_out_text(tokens, protocol, EOD)
    assert text is not None
    for batch_size in (1, 3, 64):
        found = sums_of(reader, tokens, text, batch_size)
        assert found[found > 0] == pytest.approx(expected[expected > 0], abs=2e-5)
