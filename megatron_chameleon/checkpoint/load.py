"""Load a checkpoint into a model or a training run, in any parallel layout."""

from __future__ import annotations

import contextlib
import pickle
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint.index import read_index
from megatron_chameleon.checkpoint.optimizer_fixes import convert_loaded_state, prepare_for_loading
from megatron_chameleon.checkpoint.state import (
    RANDOM,
    State,
    loadable_random_states,
    model_state,
    set_random_states,
    training_state,
)
from megatron_chameleon.errors import UserError, first_line
from megatron_chameleon.model.gpt import unwrap


def load_weights(record: CheckpointRecord, model: Sequence[torch.nn.Module]) -> None:
    """Load the weights of ``record`` into ``model``, this rank's chunks. Collective.

    Raises:
        UserError: if a file is damaged, not listed in ``record``, or belongs to another model.
    """
    with _content_errors(record.root):
        index = read_index(record.root)
        wanted = model_state(model, names=index.state_dict_metadata)
        _load_model(model, _read(record, wanted, index))


def load_training(
    record: CheckpointRecord,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Load weights, optimizer, scheduler and random states, to resume a run exactly. Collective.

    Data-parallel ranks share the same state: each rank reads a part of it, and the ranks exchange
    the parts.

    Raises:
        UserError: if a file is damaged, not listed in ``record``, or belongs to another run.
    """
    prepare_for_loading(optimizer)
    wanted = training_state(model, optimizer, scheduler, is_loading=True)
    with _content_errors(record.root):
        index = read_index(record.root)
        wanted[RANDOM] = loadable_random_states(index)
        state = merge(_read_common_state(record.root), _read(record, wanted, index))
        _load_model(model, state)
        set_random_states(state.get(RANDOM, {}))
        convert_loaded_state(optimizer, state["optimizer"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])


def _read(record: CheckpointRecord, wanted: State, index: Metadata) -> State:
    """Read the entries of ``wanted`` in the checkpoint: tensors and plain values, no pickles.

    These are the steps of megatron's ``dist_checkpointing.load``, which also reads the common
    state. Releases differ in where they store it, and unpickle it without restriction.

    megatron's "_extra_state" entries are skipped. These entries are empty without Transformer
    Engine, and torch would unpickle any bytes stored in their place.
    """
    for place in index.storage_data.values():
        if place.relative_path not in record.files:
            raise ValueError(f"{place.relative_path!r} is not listed in {record.FILE_NAME}")
    for name, part in wanted.items():
        if name.startswith("model"):
            wanted[name] = {k: v for k, v in part.items() if not k.endswith("_extra_state")}
    shards, state, factories = load_preprocess(wanted)
    shards, _ = extract_sharded_base(shards)
    validate_sharding_integrity(determine_global_metadata(shards)[1])
    strategy = FullyParallelLoadStrategyWrapper(
        TorchDistLoadShardedStrategy(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    # megatron creates its readers with a module-level function, which cannot be passed as an
    # argument.
    before = torch_dist._get_filesystem_reader
    torch_dist._get_filesystem_reader = lambda *_arguments, **_more: _TensorReader(record, index)
    try:
        with warnings.catch_warnings():
            # Both are about how megatron calls torch.
            for message in ("The argument order of load has been", "torch.distributed is disabled"):
                warnings.filterwarnings("ignore", message)
            merge(state, strategy.load(shards, record.root))
    finally:
        torch_dist._get_filesystem_reader = before
    read: State = apply_factory_merges(state, factories)
    return read


def _load_model(model: Sequence[torch.nn.Module], state: State) -> None:
    for number, chunk in enumerate(model):
        # strict=False is needed only for megatron's "_extra_state" entries; _read fails on a
        # missing weight.
        missing, unexpected = unwrap(chunk).load_state_dict(state[f"model{number}"], strict=False)
        assert not [key for key in missing if not key.endswith("_extra_state")], missing
        assert not unexpected, unexpected


class _TensorReader(FileSystemReader):
    """torch's reader of files, restricted to tensors."""

    def __init__(self, record: CheckpointRecord, index: Metadata) -> None:
        super().__init__(record.root)
        self._index = index

    def read_metadata(self, *_arguments: Any, **_more: Any) -> Metadata:
        """Return the index that is already read; torch would unpickle it without restriction."""
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of ``plan``.

        Raises:
            UnpicklingError: if the index declares an item as pickled bytes, which torch would
                unpickle without restriction.
        """
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise pickle.UnpicklingError(f"{item.dest_index.fqn} is not a tensor")
        return super().read_data(plan, planner)


def _read_common_state(folder: Path) -> State:
    """Read ``common.pt``, restricted to tensors and plain values.

    Raises:
        UserError: if the file is damaged or holds anything but tensors and plain values.
    """
    path = folder / COMMON_STATE_FNAME
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(values, dict):
            raise pickle.UnpicklingError(f"it holds a {type(values).__name__}")
    except (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error
    return values


@contextlib.contextmanager
def _content_errors(folder: Path) -> Iterator[None]:
    """Convert torch's and megatron's errors for a bad checkpoint into a UserError."""
    try:
        yield
    # RuntimeErrors are raised by devices and by other ranks; the checkpoint does not cause them.
    except (UserError, RuntimeError, OSError, MemoryError):
        raise
    except CheckpointException as error:  # raised while reading a tensor
        cause = next((cause for cause, _ in error.failures.values()), error)
        # torch collects every error of the read, including an interrupt or a lack of memory.
        memory = isinstance(cause, MemoryError | torch.OutOfMemoryError)
        if memory or not isinstance(cause, Exception):
            raise cause from error
        raise _unreadable(folder, cause) from error
    except Exception as error:  # the state of another run can raise almost any error
        raise UserError(
            f"cannot load {folder} ({type(error).__name__}: {first_line(error)}): its state does "
            "not match this run; use another checkpoint"
        ) from error


def _unreadable(path: Path, error: BaseException) -> UserError:
    referenced = re.search(r"GLOBAL (\S+)", str(error))
    if referenced:
        reason = f"it references {referenced[1]}"
    elif "weights_only" in str(error):  # torch's message advises to disable this option
        reason = "it holds more than tensors and plain values"
    else:
        reason = first_line(error)
    return UserError(
        f"cannot read {path} ({reason}): it is damaged, or crafted to run code; use another "
        "checkpoint"
    )
