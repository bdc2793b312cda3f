"""Every held-out token is predicted once, whatever the windows, batches and ranks."""

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

from megatron_chameleon.evaluation.held_out import choose_windows
from megatron_chameleon.evaluation.perplexity import mean_loss
from megatron_chameleon.evaluation.unigram import token_counts, unigram_loss
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.model.sizes import ModelShape, model_size

sizes = st.integers(1, 40)


@dataclasses.dataclass
class LabelReader:
    """In place of a model: the loss of a token is a number that stands for it alone."""

    data_rank: int = 0
    data_size: int = 1
    speaks: bool = True
    predicted: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    @property
    def layout(self) -> Any:
        return SimpleNamespace(
            data_rank=self.data_rank,
            data_size=self.data_size,
            device=torch.device("cpu"),
            is_last_stage=self.speaks,
        )

    def token_losses(self, tokens, labels):
        if not self.speaks:
            return None
        return torch.sqrt(labels.float() + 2)

    def sum_over_ranks(self, values, *, spoken):
        assert spoken == self.speaks
        return values


def mean_loss_of(reader, stream, window_length, batch_size):
    with tqdm(total=len(stream) - 1, disable=True) as progress:
        updates: list[int] = []
        progress.update = updates.append
        loss = mean_loss(reader, choose_windows(stream, window_length), batch_size, progress)
    assert sum(updates) == len(stream) - 1  # the bar ends where it should
    return loss


@given(st.integers(2, 200), sizes, sizes)
def test_windows_hold_every_prediction_once_and_in_order(length, window_length, batch_size):
    stream = np.arange(1000, 1000 + length, dtype=np.uint16)
    text = choose_windows(stream, window_length)
    num_windows = len(text.windows)
    assert num_windows == -(-(length - 1) // window_length)
    assert text.num_predictions == length - 1
    assert text.labels().tolist() == stream[1:].tolist()
    predicted = []
    for first in range(0, num_windows, batch_size):
        last = min(first + batch_size, num_windows)
        tokens, labels, mask = text.batch(first, last)
        assert tokens.shape == labels.shape == mask.shape == (last - first, window_length)
        assert tokens.dtype == labels.dtype == torch.int64
        predicted += list(zip(tokens[mask].tolist(), labels[mask].tolist(), strict=True))
        assert not tokens[~mask].any()
        assert not labels[~mask].any()
    assert predicted == list(zip(stream[:-1].tolist(), stream[1:].tolist(), strict=True))


@given(st.integers(42, 400), sizes, st.integers(0, 5))
def test_fewer_windows_are_whole_distinct_and_spread_over_the_stream(length, window_length, more):
    stream = np.arange(length, dtype=np.uint16)
    max_tokens = window_length * (1 + more) + window_length // 2
    text = choose_windows(stream, window_length, max_tokens)
    labels = text.labels()
    assert len(set(labels.tolist())) == len(labels) == text.num_predictions <= max_tokens
    if length - 1 > max_tokens:
        assert text.num_predictions == window_length * (1 + more)
        assert labels[0] == 1
        if more:  # the last window is as near to the end as a whole one can be
            assert labels[-1] > length - 1 - window_length
        gaps = np.diff(text.windows)
        assert not len(gaps) or gaps.max() - gaps.min() <= 1
    else:
        assert labels.tolist() == stream[1:].tolist()


@given(st.integers(2, 200), sizes, sizes, st.integers(1, 5))
def test_the_mean_is_over_all_ranks_and_weighs_every_token_alike(
    length, window_length, batch_size, data_size
):
    stream = np.random.default_rng(length).integers(0, 250, length).astype(np.uint16)
    expected = np.sqrt(stream[1:].astype(np.float64) + 2).mean()
    parts = [
        mean_loss_of(LabelReader(rank, data_size), stream, window_length, batch_size)
        for rank in range(data_size)
    ]
    assert sum(parts) == pytest.approx(expected, rel=1e-6)


def test_a_stage_without_losses_adds_nothing():
    stream = np.arange(100, dtype=np.uint16)
    assert mean_loss_of(LabelReader(speaks=False), stream, 8, 4) == 0.0


SHAPE = ModelShape(model_size("nano"), vocab_size=250, max_sequence_length=32)


@pytest.fixture(scope="module")
def reader(one_rank):
    model = build_model(SHAPE, one_rank, seed=3)
    model.eval()
    return Reader(model, SHAPE, one_rank)


def mean_loss_direct(reader, stream, window_length):
    """One window at a time, its softmax in float64, only the tokens there are."""
    losses = []
    for first in range(0, len(stream) - 1, window_length):
        window = torch.from_numpy(stream[first : first + window_length + 1].astype(np.int64))
        tokens = window[None, :-1]
        positions = torch.arange(tokens.size(1))[None]
        with torch.no_grad():
            logits = reader.model(tokens, positions, None)[0, :, :250].double()
        losses += (-logits.log_softmax(-1)[torch.arange(len(window) - 1), window[1:]]).tolist()
    assert len(losses) == len(stream) - 1
    return np.mean(losses)


@pytest.mark.parametrize("window_length", [32, 13, 1])
@pytest.mark.parametrize("length", [2, 33, 34, 150])
def test_a_real_models_loss_is_that_of_a_plain_loop(reader, window_length, length):
    stream = np.random.default_rng(length).integers(0, 250, length).astype(np.uint16)
    expected = mean_loss_direct(reader, stream, window_length)
    for batch_size in (1, 3, 64):
        loss = mean_loss_of(reader, stream, window_length, batch_size)
        assert loss == pytest.approx(expected, abs=1e-6)


def unigram_loss_direct(training, labels, vocab_size):
    """One label at a time, with one added to the count of every token."""
    total = 0.0
    for label in labels:
        count = sum(1 for token in training if token == label) + 1
        total -= np.log(count / (len(training) + vocab_size))
    return total / len(labels)


@given(
    st.lists(st.integers(0, 19), max_size=60),
    st.lists(st.integers(0, 19), min_size=1, max_size=60),
    st.integers(20, 40),
)
def test_the_unigram_loss_is_that_of_smoothed_frequencies(training, labels, vocab_size):
    counts = token_counts(np.array(training, dtype=np.uint16), vocab_size)
    loss = unigram_loss(counts, np.array(labels, dtype=np.uint16), vocab_size)
    assert loss == pytest.approx(unigram_loss_direct(training, labels, vocab_size), rel=1e-12)


def test_counting_in_pieces_counts_everything(monkeypatch):
    monkeypatch.setattr("megatron_chameleon.evaluation.unigram._CHUNK", 7)
    stream = np.random.default_rng(0).integers(0, 30, 100).astype(np.uint16)
    counts = token_counts(stream, 40)
    assert counts.tolist() == [int((stream == token).sum()) for token in range(40)]
