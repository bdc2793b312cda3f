"""Muon: its updates and its resume. tests/distributed trains with it on several ranks."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from importlib import metadata
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

from megatron_chameleon.checkpoint.load import load_training
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.gpt import unwrap
from megatron_chameleon.training.options import OptimizerOptions
from tests.random_training import RandomTraining, random_batches
from tests.unit.checkpoint.samples import saved

SHAPE = ModelConfig(2, 4, 64, 128, vocab_size=200, max_sequence_length=32)
OPTIONS = OptimizerOptions(
    optimizer="muon", lr=1e-2, min_lr=1e-2, lr_warmup_iters=0, weight_decay=0.0
)
ROWS = 8
HAS_RELEASE = Version(version("megatron-core")).release >= (0, 18)
has_muon = pytest.mark.skipif(
    not HAS_RELEASE or importlib.util.find_spec("emerging_optimizers") is None,
    reason="needs a newer release of megatron-core, and emerging-optimizers",
)


def training_on(layout, options=OPTIONS, **settings):
    return RandomTraining(SHAPE, layout, optimizer=options, **{"bf16": False, **settings})


def step_on(training):
    """Take a step on the first batch."""
    passes = training.passes(1, ROWS)
    batches = random_batches(SHAPE.vocab_size, ROWS, SHAPE.max_sequence_length)
    training.step(lambda: passes.forward_backward(batches))


def weights_of(training):
    parameters = unwrap(training.chunks[0]).named_parameters()
    return {name: parameter.detach().clone() for name, parameter in parameters}


@has_muon
def test_updates_of_the_layers_matrices_are_orthogonal_and_others_are_adams(one_rank):
    training = training_on(one_rank)
    before = weights_of(training)
    step_on(training)
    assert training.model.lr == OPTIONS.lr
    for name, weight in weights_of(training).items():
        update = (weight - before[name]) / OPTIONS.lr
        if not name.startswith("decoder.layers.") or weight.dim() != 2:
            # The first step of Adam changes every weight by the learning rate.
            assert float(update.abs().max()) == pytest.approx(1, rel=1e-2), name
            continue
        # Queries, keys and values are three matrices, interleaved by head.
        parts = [update]
        if "linear_qkv" in name:
            parts = list(update.unflatten(0, (4, 3, 16)).transpose(0, 1).flatten(1, 2))
        for part in parts:
            # Five Newton-Schulz steps bring singular values near 1; small ones stay smaller. The
            # default scale of megatron is the root of the larger dimension.
            singular = torch.linalg.svdvals(part) / math.sqrt(max(part.shape))
            assert float(singular.max()) < 1.3, name
            assert float(singular.median()) > 0.6, name


@has_muon
@pytest.mark.parametrize("bf16", [False, True])
def test_training_resumes_bit_for_bit(one_rank, tmp_path, bf16):
    options = dataclasses.replace(OPTIONS, min_lr=1e-3, lr_warmup_iters=2, weight_decay=0.1)
    straight, resumed = (training_on(one_rank, options, bf16=bf16, train_iters=8) for _ in range(2))
    for _ in range(3):
        step_on(straight)
    record = saved(straight.model.state(), tmp_path / "step")
    load_training(record, resumed.chunks, resumed.optimizer, resumed.model.scheduler)
    for training in (straight, resumed):
        for _ in range(3):
            step_on(training)
    expected = weights_of(straight)
    for name, weight in weights_of(resumed).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.skipif(HAS_RELEASE, reason="this release has Muon")
def test_an_earlier_release_is_named_with_the_one_that_is_needed(one_rank):
    with pytest.raises(UserError, match=r"--optimizer muon needs megatron-core 0\.18 .* but 0\.1"):
        training_on(one_rank)


@has_muon
@pytest.mark.parametrize("missing", [metadata.PackageNotFoundError, "0.2.1"])
def test_a_missing_or_old_package_is_named(one_rank, monkeypatch, missing):
    def installed(package):
        if package != "emerging-optimizers":
            return version(package)
        if isinstance(missing, str):
            return missing
        raise missing

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(UserError, match=r"pip install 'megatron-chameleon\[muon\]'"):
        training_on(one_rank)
