from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron_chameleon.training.guard import StepSync
from megatron_chameleon.training.stopping import REASONS

NONE = [0.0] * len(REASONS)


def sums(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_the_loss_is_the_mean_over_the_tokens_of_all_domains(one_rank):
    agreement = StepSync(one_rank)
    agreement.send(sums([6.0, 2, 3], [0, 0, 4], [9.0, 1, 1]), NONE)
    assert agreement.loss() == 5.0
    assert agreement.stop_reasons() == []


def test_a_step_in_which_no_token_has_a_loss_has_none(one_rank):
    agreement = StepSync(one_rank)
    agreement.send(sums([0.0, 0, 8]), NONE)
    assert agreement.loss() is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_domain_s_bad_loss_is_the_step_s(one_rank, bad):
    agreement = StepSync(one_rank)
    agreement.send(sums([6.0, 2, 2], [bad, 1, 1]), NONE)
    loss = agreement.loss()
    assert loss is not None
    assert not math.isfinite(loss)


def test_ranks_that_hold_copies_do_not_speak_but_may_ask_to_stop(one_rank):
    agreement = StepSync(dataclasses.replace(one_rank, tensor_rank=1))
    agreement.send(sums([6.0, 2, 2]), [1.0, 0.0, 0.0, 1.0])
    assert agreement.loss() is None
    assert agreement.stop_reasons() == [REASONS[0], REASONS[3]]


def test_each_step_is_told_anew(one_rank):
    agreement = StepSync(one_rank)
    agreement.send(sums([6.0, 2, 2]), [0.0, 1.0, 0.0, 0.0])
    agreement.send(sums([2.0, 2, 2]), NONE)
    assert (agreement.loss(), agreement.stop_reasons()) == (1.0, [])
