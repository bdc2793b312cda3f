"""Compare validation with plain torch, window by window."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.evaluation.held_out import choose_windows
from megatron_chameleon.model.config import preset
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.training.step import BatchShape, Passes
from megatron_chameleon.training.validation import Validation, validation_text
from tests.small_corpus import VOCAB_SIZE

SHAPE = preset("nano", VOCAB_SIZE, max_sequence_length=32)
NAMES = ["a", "empty", "b"]


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    streams = [rng.integers(0, VOCAB_SIZE, length) for length in (150, 75)]
    first, second = (choose_windows(stream, 32) for stream in streams)
    return [first, None, second]


@pytest.fixture
def validation(texts, one_rank):
    model = build_model(SHAPE, one_rank, seed=0)
    return Validation(texts, NAMES, Passes([model], BatchShape(3, 2, 32), 3), one_rank), model


def plain_losses(model, text):
    """Mean loss of the predicted tokens, computed one window at a time."""
    losses = []
    for begin, end in zip(text.windows.begin, text.windows.end, strict=True):
        piece = torch.tensor(text.stream[begin - 1 : end])
        positions = torch.arange(len(piece) - 1)[None]
        with torch.no_grad():
            logits = model(piece[None, :-1], positions, None)[0, :, :VOCAB_SIZE]
        losses.append(torch.nn.functional.cross_entropy(logits, piece[1:], reduction="none"))
    return torch.cat(losses).double().mean().item()


def test_losses_equal_plain_means_and_training_is_unchanged(validation, texts):
    found, model = validation
    before = torch.get_rng_state()
    losses = found.losses()
    assert list(losses) == ["a", "b"]
    assert losses["a"] == pytest.approx(plain_losses(model, texts[0]), abs=1e-5)
    assert losses["b"] == pytest.approx(plain_losses(model, texts[2]), abs=1e-5)
    assert len(found) == 12  # two domains with 5 and 3 windows, in batches of 6
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found.losses() == losses


def test_domain_may_start_within_a_file(corpus):
    (whole, *_) = open_domains(corpus).of("train").domains
    lengths = whole.open().lengths
    tokens = int(lengths[10:25].sum())
    part = dataclasses.replace(whole, first=10, stop=25, tokens=tokens)
    text = validation_text(part, 32, max_windows=1000)
    assert text is not None
    skipped = int(lengths[:10].sum())
    scored = np.concatenate([positions for positions, _ in text.scored_blocks()])
    assert scored.tolist() == list(range(skipped + 1, skipped + tokens))
