"""Checkpoints between torch's AdamW and an Adam that keeps its state as Transformer Engine's does.

Transformer Engine itself needs a GPU. The optimizer here has the state layout and the loading rules
of its FusedAdam, and torch's arithmetic, so that a resumed run has to be the uninterrupted one.
"""

from __future__ import annotations

import dataclasses

import megatron.core.optimizer as megatron_optimizer
import pytest
import torch
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint.load import load_training
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import training_state
from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.training.optimizer import build_optimizer, build_scheduler, data_parallel
from tests.unit.checkpoint.test_checkpoint_round_trip import OPTIONS, SHAPE, record_at, train

STATE = ("exp_avg", "exp_avg_sq")


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW with the step in the parameter groups, and the group settings of FusedAdam."""

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode):
        assert adam_w_mode
        settings = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps}
        super().__init__(params, settings | {"weight_decay": weight_decay})

    def load_state_dict(self, state_dict):
        """Like FusedAdam, know no state but the moments."""
        for state in state_dict["state"].values():
            for name in state:
                if name not in STATE:
                    raise KeyError(name)
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["bias_correction"]
            group["step"] = group.get("step", 0) + 1
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                for name in STATE:
                    self.state[parameter].setdefault(name, torch.zeros_like(parameter))
            adamw(
                parameters,
                [p.grad for p in parameters],
                [self.state[p]["exp_avg"] for p in parameters],
                [self.state[p]["exp_avg_sq"] for p in parameters],
                [],
                [torch.tensor(group["step"] - 1.0) for _ in parameters],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def trainer(layout, patched, *, bf16, fused_adam):
    """A model, optimizer and scheduler; megatron-core chooses its Adam when it is imported."""
    with patched.context() as chosen:
        if fused_adam:
            chosen.setattr(megatron_optimizer, "Adam", GroupStepAdam)
            chosen.setattr(distrib_optimizer, "Adam", GroupStepAdam)
            chosen.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
        model = data_parallel([build_model(SHAPE, layout, seed=5, bf16=bf16)], layout, bf16=bf16)
        optimizer = build_optimizer(model, OPTIONS, layout, bf16=bf16)
    kind = GroupStepAdam if fused_adam else torch.optim.AdamW
    assert all(isinstance(part.optimizer, kind) for part in optimizer.chained_optimizers)
    return model, optimizer, build_scheduler(optimizer, OPTIONS, train_iters=8)


def choose_adam(monkeypatch, *, fused):
    """What the distributed optimizer asks when it saves and loads."""
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", fused)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", fused)


@pytest.mark.parametrize("to_fused", [True, False])
@pytest.mark.parametrize(
    ("sharded", "bf16"),
    [(False, False), (False, True), (True, False)],
    ids=["fp32", "bf16", "sharded"],
)
def test_either_adam_resumes_what_the_other_saved(
    one_rank, tmp_path, monkeypatch, sharded, bf16, to_fused
):
    layout = dataclasses.replace(one_rank, use_distributed_optimizer=sharded)
    whole = trainer(layout, monkeypatch, bf16=bf16, fused_adam=not to_fused)
    train(whole, 1, 3)
    choose_adam(monkeypatch, fused=not to_fused)
    save_checkpoint(training_state(*whole, is_loading=False), record_at(tmp_path / "step"))
    train(whole, 4, 6)

    resumed = trainer(layout, monkeypatch, bf16=bf16, fused_adam=to_fused)
    choose_adam(monkeypatch, fused=to_fused)
    load_training(CheckpointRecord.load(tmp_path / "step"), *resumed)
    train(resumed, 4, 6)
    expected, found = (dict(unwrap(run[0][0]).named_parameters()) for run in (whole, resumed))
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
