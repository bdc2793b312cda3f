"""Every layout computes what one rank computes, step by step."""

from __future__ import annotations

import itertools

import pytest

from tests.distributed.layout_cases import (
    LEAST_DIFFERENCE,
    LOSS_ROUNDING,
    NARROW_RUN,
    NORM_ROUNDING,
    RUNS,
    RUNS_APART,
    RUNS_BF16,
    TRAIN_ITERS,
)

BF16_TOLERANCE = 5e-3
ONE_RANK = {
    **{name: "one" for name in (*RUNS, NARROW_RUN) if name != "one"},
    **{name: "one-apart" for name in RUNS_APART if name != "one-apart"},
    "dp2-changing": "one-changing",
}
"""Every run of another layout, and the run of one rank that it repeats."""


def test_the_run_is_one_in_which_an_error_would_show(results):
    steps = results.metrics("one")
    losses = [step["loss"] for step in steps]
    moves = [abs(after - before) for before, after in itertools.pairwise(losses)]
    assert len(steps) == TRAIN_ITERS >= 12
    assert losses[0] - losses[-1] > 1.0  # it learns, so the updates matter
    assert min(moves) > LEAST_DIFFERENCE
    assert min(step["grad_norm"] for step in steps) > 1.0  # every gradient is clipped


def test_runs_that_keep_documents_apart_are_other_runs(results):
    plain, apart = results.metrics("one"), results.metrics("one-apart")
    tokens = [[sum(s["domain_tokens"].values()) for s in steps] for steps in (plain, apart)]
    assert all(few < all_of_them for all_of_them, few in zip(*tokens, strict=True))
    assert len(set(tokens[1])) > 1  # so the steps' batches, and their parts, are unequal
    for one, other in zip(plain, apart, strict=True):
        losses = one["domain_loss"], other["domain_loss"]  # in their mean they may cancel
        assert max(abs(losses[0][name] - losses[1][name]) for name in losses[1]) > LEAST_DIFFERENCE


@pytest.mark.parametrize("name", ONE_RANK)
def test_losses_are_those_of_one_rank(results, name):
    expected, found = results.metrics(ONE_RANK[name]), results.metrics(name)
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        assert other["step"] == one["step"]
        assert other["loss"] == pytest.approx(one["loss"], rel=0, abs=LOSS_ROUNDING)
        assert other["domain_loss"] == pytest.approx(one["domain_loss"], rel=0, abs=LOSS_ROUNDING)


@pytest.mark.parametrize("name", ONE_RANK)
def test_gradient_norms_are_those_of_one_rank(results, name):
    for one, other in zip(results.metrics(ONE_RANK[name]), results.metrics(name), strict=True):
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=NORM_ROUNDING)


@pytest.mark.parametrize("name", ONE_RANK)
def test_every_layout_reads_the_same_tokens_at_the_same_rates(results, name):
    for one, other in zip(results.metrics(ONE_RANK[name]), results.metrics(name), strict=True):
        for field in ("tokens", "domain_tokens", "lr"):
            assert other[field] == one[field]


def test_the_narrow_run_has_another_padding(results):
    """Four rows fewer in the embedding and in both of its moments, 64 wide, in float32."""
    missing = 3 * 4 * 64 * 4
    wide, narrow = (
        sum(
            file.bytes
            for name, file in results.checkpoint(run, TRAIN_ITERS).files.items()
            if name.endswith(".distcp")
        )
        for run in ("tp2", NARROW_RUN)
    )
    assert wide - narrow == pytest.approx(missing, rel=0.1)  # archives are padded


@pytest.mark.parametrize("name", [name for name in RUNS_BF16 if name != "one-bf16"])
def test_bf16_losses_are_those_of_one_rank_in_bf16(results, name):
    """bfloat16 has 8 bits: sums in another order differ far more than in float32."""
    for one, other in zip(results.metrics("one-bf16"), results.metrics(name), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0, abs=BF16_TOLERANCE)
