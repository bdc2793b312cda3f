"""Reading a checkpoint, in whatever layout this process runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.metadata import Metadata

from megatron_chameleon.artifacts.checkpoint import FILE_NAME, CheckpointRecord
from megatron_chameleon.checkpoint.adamw_repairs import convert_loaded_state, prepare_for_loading
from megatron_chameleon.checkpoint.checked_reading import CheckedLoadStrategy
from megatron_chameleon.checkpoint.pickled_index import read_index
from megatron_chameleon.checkpoint.random_state import (
    loadable_random_states,
    set_random_states,
)
from megatron_chameleon.checkpoint.state import RANDOM, State, model_state, training_state
from megatron_chameleon.checkpoint.unpickled import SmallValues, checking_content
from megatron_chameleon.model.gpt import unwrap


def load_weights(record: CheckpointRecord, model: Sequence[torch.nn.Module]) -> None:
    """Read the weights of ``record`` into ``model``, this rank's chunks.

    Raises:
        UserError: if a file is damaged, not listed in ``record``, or not of such a model.
    """
    wanted = model_state(model)
    with checking_content(record.root):
        state = _read(record, wanted, read_index(record.root))
        _load_model(model, state)


def load_training(
    record: CheckpointRecord,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Read weights, optimizer, schedule and random state of ``record``: the run goes on as it was.

    Data-parallel ranks read a part each of what they have in common, and exchange it.

    Raises:
        UserError: if a file is damaged, not listed in ``record``, or not of such a run.
    """
    prepare_for_loading(optimizer)
    wanted = training_state(model, optimizer, scheduler, is_loading=True)
    with checking_content(record.root):
        index = read_index(record.root)
        wanted[RANDOM] = loadable_random_states(index)
        state = _read(record, wanted, index)
        _load_model(model, state)
        set_random_states(state.get(RANDOM, {}))
        convert_loaded_state(optimizer, state["optimizer"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])


def _read(record: CheckpointRecord, wanted: State, index: Metadata) -> State:
    """What the checkpoint holds of ``wanted``: tensors and plain values, nothing pickled.

    megatron's "_extra_state" entries are left out. They are empty without Transformer Engine, and
    torch would unpickle whatever is in their place.
    """
    for place in index.storage_data.values():
        if place.relative_path not in record.files:
            raise ValueError(f"{place.relative_path!r} is not listed in {FILE_NAME}")
    for name, part in wanted.items():
        if name.startswith("model"):
            wanted[name] = {k: v for k, v in part.items() if not k.endswith("_extra_state")}
    return dist_checkpointing.load(wanted, str(record.root), _strategy(index), SmallValues())


def _strategy(index: Metadata) -> FullyParallelLoadStrategyWrapper:
    return FullyParallelLoadStrategyWrapper(
        CheckedLoadStrategy(index),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def _load_model(model: Sequence[torch.nn.Module], state: State) -> None:
    for number, chunk in enumerate(model):
        # strict=False for megatron's "_extra_state" entries alone; a missing weight is an error
        # above.
        missing, unexpected = unwrap(chunk).load_state_dict(state[f"model{number}"], strict=False)
        assert not [key for key in missing if not key.endswith("_extra_state")], missing
        assert not unexpected, unexpected
