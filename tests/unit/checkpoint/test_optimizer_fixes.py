"""Fixes for saving and loading optimizer state.

Transformer Engine's FusedAdam needs a GPU. GroupStepAdam replaces it: it has the same state layout
and loading rules, but torch's arithmetic, so that a resumed run must equal an uninterrupted run.
"""

from __future__ import annotations

import dataclasses

import megatron.core.optimizer as megatron_optimizer
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw

from megatron_chameleon.checkpoint.load import load_training
from megatron_chameleon.checkpoint.optimizer_fixes import gather_with_padding
from megatron_chameleon.checkpoint.state import training_state
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.training import optimizer as optimizers
from megatron_chameleon.training.options import OptimizerOptions
from tests.unit.checkpoint.samples import saved, train, trainer_of

STATE = ("exp_avg", "exp_avg_sq")
# Layer widths for which parameters do not end at the end of a bucket.
UNEVEN = ModelConfig(2, 2, 36, 72, vocab_size=100, max_sequence_length=16)


@pytest.fixture
def bucketed(one_rank, monkeypatch):
    """Make a sharded optimizer with several buckets, and different moments for each parameter."""

    def with_small_buckets(**settings):
        return DistributedDataParallelConfig(**settings, bucket_size=3000)

    monkeypatch.setattr(optimizers, "DistributedDataParallelConfig", with_small_buckets)
    layout = dataclasses.replace(one_rank, use_distributed_optimizer=True, overlap_grad_reduce=True)
    model = optimizers.data_parallel([build_model(UNEVEN, layout, seed=1)], layout, bf16=False)
    chained = optimizers.build_optimizer(model, OptimizerOptions(), layout, bf16=False)
    (part,) = chained.chained_optimizers
    for number, shard in enumerate(p for g in part.optimizer.param_groups for p in g["params"]):
        part.optimizer.state[shard] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.full_like(shard, number + 1.0),
            "exp_avg_sq": torch.full_like(shard, number + 0.5),
        }
    return part


def misplaced(bucketed):
    """Count parameters whose place in the gathered buffer holds another parameter's state."""
    state = bucketed.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    wrong = 0
    for number, buffer in enumerate(bucketed.buffers):
        (tensors,) = state[number].values()
        for parameter, (start, stop, _) in buffer.param_index_map.items():
            own = bucketed._get_main_param_and_optimizer_states(parameter)
            for key in ("param", *STATE):
                wrong += not torch.equal(tensors[key][start:stop], own[key].flatten())
    return wrong


def test_gathering_with_padding_keeps_every_parameter_in_its_place(bucketed):
    assert len(bucketed.buffers[0].buckets) > 2
    # If this assertion fails after an update of megatron-core, the fix has become unnecessary.
    assert misplaced(bucketed) > 0
    gather_with_padding(bucketed)
    gather_with_padding(bucketed)  # the second call must have no effect
    assert misplaced(bucketed) == 0


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW with the step in the parameter groups, and the group settings of FusedAdam."""

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode, **_more):
        assert adam_w_mode
        settings = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps}
        super().__init__(params, settings | {"weight_decay": weight_decay})

    def load_state_dict(self, state_dict):
        """Reject state other than the moments, like FusedAdam."""
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
    """Make a model, optimizer and scheduler; megatron-core selects its Adam when it is imported."""
    # The distributed optimizer reads these flags when it saves and loads.
    for name in ("HAVE_APEX_OR_TE", "USING_TE_OPTIMIZER"):
        patched.setattr(distrib_optimizer, name, fused_adam)
    with patched.context() as chosen:
        if fused_adam:
            chosen.setattr(megatron_optimizer, "Adam", GroupStepAdam)
            chosen.setattr(distrib_optimizer, "Adam", GroupStepAdam)
            chosen.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
        made = trainer_of(layout, bf16=bf16)
    kind = GroupStepAdam if fused_adam else torch.optim.AdamW
    assert all(isinstance(part.optimizer, kind) for part in made[1].chained_optimizers)
    return made


@pytest.mark.parametrize("to_fused", [True, False])
@pytest.mark.parametrize(
    ("sharded", "bf16"),
    [(False, False), (False, True), (True, False)],
    ids=["fp32", "bf16", "sharded"],
)
def test_each_adam_resumes_a_checkpoint_of_the_other(
    one_rank, tmp_path, monkeypatch, sharded, bf16, to_fused
):
    layout = dataclasses.replace(one_rank, use_distributed_optimizer=sharded)
    whole = trainer(layout, monkeypatch, bf16=bf16, fused_adam=not to_fused)
    train(whole, 1, 3)
    record = saved(training_state(*whole, is_loading=False), tmp_path / "step")
    train(whole, 4, 6)

    resumed = trainer(layout, monkeypatch, bf16=bf16, fused_adam=to_fused)
    load_training(record, *resumed)
    train(resumed, 4, 6)
    expected, found = (dict(unwrap(run[0][0]).named_parameters()) for run in (whole, resumed))
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
