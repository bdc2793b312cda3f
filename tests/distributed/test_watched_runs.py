"""What one rank finds, all ranks heed; and watching changes nothing of what is trained."""

from __future__ import annotations

import pytest

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.checkpoint import checkpoint_folders, step_folder
from tests.distributed.layout_cases import TRAIN_ITERS
from tests.distributed.watched_cases import BAD_STEPS, EVAL_INTERVAL, WATCHED, plain_run

TOLERANCE = 1e-5
MORE_FIELDS = ("validation_loss", "skipped_steps", "skipped")


@pytest.mark.parametrize("name", WATCHED)
def test_validation_leaves_the_losses_as_they_are(results, name):
    plain, watched = results.metrics(plain_run(name)), results.metrics(name)
    for one, other in zip(plain[: BAD_STEPS[0] - 1], watched, strict=False):
        assert {k: v for k, v in other.items() if k not in MORE_FIELDS} == {
            k: v for k, v in one.items() if k not in MORE_FIELDS
        }


@pytest.mark.parametrize("name", WATCHED)
def test_every_layout_finds_the_same_validation_loss(results, name):
    expected, found = results.metrics("one-watched"), results.metrics(name)
    steps = [line["step"] for line in found if "validation_loss" in line]
    assert steps == list(range(EVAL_INTERVAL, TRAIN_ITERS + 1, EVAL_INTERVAL))
    for one, other in zip(expected, found, strict=True):
        losses = other.get("validation_loss", {})
        assert losses == pytest.approx(one.get("validation_loss", {}), rel=0, abs=TOLERANCE)
    last = found[-1]["validation_loss"]
    assert sum(last.values()) < sum(found[EVAL_INTERVAL - 1]["validation_loss"].values())


@pytest.mark.parametrize("name", WATCHED)
def test_one_rank_s_bad_gradient_skips_the_step_on_all(results, name):
    lines = results.metrics(name)
    skipped = [step for line in lines for step in line.get("skipped", [])]
    assert [step["step"] for step in skipped] == list(BAD_STEPS)
    assert [step["reason"] for step in skipped] == ["the gradient's norm is nan"] * 2
    assert [line["skipped_steps"] for line in lines] == [0] * 5 + [1] + [2] * 6
    assert [lines[step - 1]["loss"] for step in BAD_STEPS] == [None, None]
    run = TrainingRun.load(results.places.run(name))
    assert (run.status, run.skipped_steps) == ("finished", 2)


@pytest.mark.parametrize("name", WATCHED)
def test_all_layouts_go_on_alike_after_it(results, name):
    for one, other in zip(results.metrics("one-watched"), results.metrics(name), strict=True):
        assert other["drawn"] == one["drawn"]
        assert other["lr"] == one["lr"]
        if other["step"] not in BAD_STEPS:
            assert other["loss"] == pytest.approx(one["loss"], rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("name", WATCHED)
def test_the_checkpoint_waits_until_a_step_is_good(results, name):
    results.require(name)
    folder = results.places.run(name)
    steps = (BAD_STEPS[-1] + 1, TRAIN_ITERS)
    assert checkpoint_folders(folder) == [step_folder(folder, step) for step in steps]
