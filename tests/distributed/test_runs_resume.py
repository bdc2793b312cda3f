"""A run goes on from a checkpoint, in the layout that wrote it or another."""

from __future__ import annotations

import pytest

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.errors import UserError
from tests.distributed.layout_cases import (
    DP2,
    DP2_SHARDED,
    LEAST_DIFFERENCE,
    LOSS_ROUNDING,
    NORM_ROUNDING,
    RESUMED,
    SAVE_INTERVAL,
    TRAIN_ITERS,
    UNREPAIRED,
    training_options,
)

SAME_LAYOUT = [name for name, (origin, _) in RESUMED.items() if name == f"{origin}-to-{origin}"]


@pytest.mark.parametrize("name", RESUMED)
def test_it_continues_as_if_never_interrupted(results, name):
    origin, _ = RESUMED[name]
    for before, after in zip(results.metrics(origin), results.metrics(name), strict=True):
        assert after["step"] == before["step"]
        assert after["tokens"] == before["tokens"]
        assert after["domain_tokens"] == before["domain_tokens"]
        assert after["drawn"] == before["drawn"]
        assert after["lr"] == before["lr"]
        assert after["loss"] == pytest.approx(before["loss"], rel=0, abs=LOSS_ROUNDING)
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=NORM_ROUNDING)


@pytest.mark.parametrize("name", RESUMED)
def test_the_run_is_recorded_as_one(results, name):
    origin, case = RESUMED[name]
    whole, resumed = (TrainingRun.load(results.places.run(run)) for run in (origin, name))
    assert resumed.status == "finished"
    assert resumed.step == TRAIN_ITERS
    assert resumed.domain_tokens == whole.domain_tokens
    assert len(resumed.checkpoints) == TRAIN_ITERS // SAVE_INTERVAL
    layout = results.checkpoint(name, TRAIN_ITERS).layout
    assert layout["world_size"] == case.ranks
    assert layout["tensor_model_parallel_size"] == case.parallel.tensor_model_parallel_size


@pytest.mark.parametrize("name", ["one-changing-to-dp2", "dp2-feistel-to-one"])
def test_weights_that_change_go_on_from_where_each_domain_stood(results, name):
    origin, _ = RESUMED[name]
    before, after = (results.checkpoint(run, TRAIN_ITERS) for run in (origin, name))
    assert before.domain_samples == after.domain_samples
    # Four steps by thirds, five without news, three by thirds: each of 8 samples.
    assert before.domain_samples["news"] == 11 + 8
    assert [phase.first_sample for phase in after.mixture_phases] == [0, 32, 72]
    assert results.checkpoint(name, SAVE_INTERVAL).mixture_phases == after.mixture_phases[:2]


def test_there_are_resumptions_at_the_same_layout():
    assert SAME_LAYOUT == [
        "tp2-to-tp2",
        "dp2-sharded-to-dp2-sharded",
        "vpp2-dp2-overlapped-full-to-vpp2-dp2-overlapped-full",
    ]


@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_the_same_layout_continues_bit_identically(results, name):
    origin, _ = RESUMED[name]
    assert results.metrics(name) == results.metrics(origin)
    resumed, whole = (results.checkpoint(run, TRAIN_ITERS) for run in (name, origin))
    assert resumed.hash == whole.hash


@pytest.mark.parametrize("name", UNREPAIRED)
def test_without_the_adamw_repairs_a_sharded_optimizer_does_not_continue(results, name):
    """Should this fail after an update of megatron-core, the repair has become needless."""
    results.require(name)
    failure = results.places.failure(name)
    if not failure.exists():
        whole, resumed = results.metrics("dp2-sharded"), results.metrics(name)
        errors = [abs(a["loss"] - b["loss"]) for a, b in zip(whole, resumed, strict=True)]
        assert max(errors) > LEAST_DIFFERENCE
        return
    # Megatron looks for a step count in vain.
    assert "AssertionError" in failure.read_text() or "KeyError: 'step'" in failure.read_text()


@pytest.mark.parametrize(
    ("run", "case", "remedy"),
    [
        ("dp2-sharded", DP2, "written with --use-distributed-optimizer .*; give"),
        ("dp2", DP2_SHARDED, "written without --use-distributed-optimizer .*; leave out"),
    ],
)
def test_the_two_forms_of_optimizer_state_are_told_apart(results, run, case, remedy):
    from megatron_chameleon.options.parallel import ParallelOptions
    from megatron_chameleon.parallel.layout import distributed
    from megatron_chameleon.training.plan import plan_training
    from megatron_chameleon.training.resume import find_progress

    results.require(run)
    plan = plan_training(training_options(results.places, run, case))
    with (
        distributed(ParallelOptions(), seed=0) as layout,
        pytest.raises(UserError, match=remedy),
    ):
        find_progress(plan, layout)
