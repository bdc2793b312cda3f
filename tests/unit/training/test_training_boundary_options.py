"""The options on the ends of documents, from a run's options to its metrics."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.trainer import pretrain

OPTIONS = [field.name for field in dataclasses.fields(DocumentBoundaryOptions)]


@pytest.fixture
def first_steps(pretrain_options, tmp_path):
    """``first_steps(name, boundaries, ...)``: a line of metrics for each of two steps."""

    def run(name, boundaries, **changes):
        options = pretrain_options(
            tmp_path / name,
            boundaries=boundaries,
            train_iters=2,
            log_interval=1,
            optimizer=OptimizerOptions(lr=1e-2, lr_warmup_iters=0),
            **{"micro_batch_size": 4, **changes},
        )
        pretrain(options)
        return list(TrainingRun.load(options.run_dir).metrics())

    return run


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_changes_the_losses(first_steps, name):
    plain = first_steps("plain", DocumentBoundaryOptions())
    other = first_steps(name, DocumentBoundaryOptions(**{name: True}))
    for one, two in zip(plain, other, strict=True):
        assert abs(one["loss"] - two["loss"]) > 1e-5


def test_masked_ends_do_not_make_a_run_hang_on_its_micro_batches(first_steps):
    """A mean of micro-batch means would: their numbers of ends differ."""
    masked = DocumentBoundaryOptions(eod_mask_loss=True)
    whole, halves, singles = (
        first_steps(f"by-{size}", masked, micro_batch_size=size) for size in (8, 4, 1)
    )
    for one, two, three in zip(whole, halves, singles, strict=True):
        for field in ("loss", "grad_norm"):
            assert one[field] == pytest.approx(two[field], rel=1e-5)
            assert one[field] == pytest.approx(three[field], rel=1e-5)
