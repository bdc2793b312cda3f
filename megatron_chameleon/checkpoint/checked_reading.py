"""Reading tensors by an index that was checked, and nothing that would have to be unpickled."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner


class CheckedReader(FileSystemReader):
    """torch's reader of files, for an index that was read before.

    It has no index of a rank alone, which torch would look for (``read_metadata`` takes no rank).
    """

    def __init__(self, folder: str | Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self) -> Metadata:
        """The index; the file is not read again."""
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read tensors, by ``weights_only``.

        Raises:
            UnpicklingError: for anything else: the planner would unpickle it, code and all.
        """
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                raise pickle.UnpicklingError(f"{item.storage_index.fqn} is no tensor in it")
        return super().read_data(plan, planner)


class CheckedLoadStrategy(TorchDistLoadShardedStrategy):
    """megatron's strategy for torch_dist, which finds its way by ``index`` alone."""

    def __init__(self, index: Metadata) -> None:
        super().__init__()
        self._index = index

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> StateDict:
        """As megatron's."""
        with _reading_by(self._index):
            return super().load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(
        self, checkpoint_dir: Path, metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """As megatron's."""
        return super().load_tensors_metadata(checkpoint_dir, metadata or self._index)

    def load_sharded_metadata(self, checkpoint_dir: Path) -> ShardedStateDict:
        """As megatron's."""
        with _reading_by(self._index):
            return super().load_sharded_metadata(checkpoint_dir)


@contextlib.contextmanager
def _reading_by(index: Metadata) -> Iterator[None]:
    """A block in which megatron's readers have ``index``.

    It makes its reader by a function of the module, and takes none by argument.
    """
    before = torch_dist._get_filesystem_reader

    def reader(checkpoint_dir: str | Path, cache_metadata: bool = False) -> Any:
        return CheckedReader(checkpoint_dir, index)

    torch_dist._get_filesystem_reader = reader
    try:
        yield
    finally:
        torch_dist._get_filesystem_reader = before
