"""Reading a checkpoint, in whatever layout this process runs."""

from __future__ import annotations

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.checkpoint.adamw_repairs import prepare_for_loading
from megatron_chameleon.checkpoint.state import model_state, training_state
from megatron_chameleon.model.gpt import unwrap


def load_weights(record: CheckpointRecord, model: torch.nn.Module) -> None:
    """Read the weights of ``record`` into ``model``."""
    state = dist_checkpointing.load(model_state(model), str(record.root))
    _load_model(model, state["model"])


def load_training(
    record: CheckpointRecord,
    model: torch.nn.Module,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Read weights, optimizer and schedule of ``record``, so that the run goes on as it was."""
    prepare_for_loading(optimizer)
    wanted = training_state(model, optimizer, scheduler, is_loading=True)
    state = dist_checkpointing.load(wanted, str(record.root))
    _load_model(model, state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])


def _load_model(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    # strict=False for megatron's "_extra_state" entries alone; a missing weight is an error above.
    missing, unexpected = unwrap(model).load_state_dict(state, strict=False)
    assert not [key for key in missing if not key.endswith("_extra_state")], missing
    assert not unexpected, unexpected
