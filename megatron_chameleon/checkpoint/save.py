"""Write a checkpoint: all ranks write to a temporary folder, and rank 0 renames it.

megatron plans the save and writes the tensors. This module adds three things:

- The process that writes a file also hashes the file, in the background if the save is
  asynchronous.
- A failure on one rank is reported to rank 0 and raised on all ranks. megatron would wait for the
  rank that has failed.
- Results are passed in memory, and threads write the files. megatron would start one process for
  the results, which outlives a killed rank, and one process per file, and would wait forever for a
  killed process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import itertools
import logging
import os
import pickle
import queue
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, _disable_gc
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from megatron_chameleon.artifacts.checkpoint import (
    CheckpointFile,
    CheckpointRecord,
    hash_files,
    remove_leftovers,
    temporary_name,
)
from megatron_chameleon.artifacts.files import flush_to_disk, replace_folder
from megatron_chameleon.checkpoint.state import State
from megatron_chameleon.errors import UserError, first_line
from megatron_chameleon.parallel.layout import from_main
from megatron_chameleon.parallel.releases import saving_arguments

_OWN_WRITER = saving_arguments(TorchDistSaveShardedStrategy.async_save)
# From 0.17 on, megatron-core logs at every save that another package will replace its writer.
logging.getLogger(torch_dist.__name__).addFilter(
    lambda record: "async save is deprecated" not in record.getMessage()
)


class SaveError(UserError):
    """A checkpoint could not be written. Raised on every rank; earlier checkpoints are intact."""


def save_checkpoint(state: State, record: CheckpointRecord) -> None:
    """Write ``state`` and ``record`` to ``record.root``. Collective.

    The folder is renamed into place once complete; the temporary folder of a killed save is
    removed.

    Raises:
        UserError: on every rank, if any rank cannot write; earlier checkpoints are intact.
    """
    try:
        plan_save(state, record).execute_sync()
    except SaveError as error:
        raise UserError(
            f"{error}; free space or choose another folder, and run again: earlier checkpoints are "
            "intact"
        ) from error


def plan_save(state: State, record: CheckpointRecord) -> AsyncRequest:
    """Plan a save and return the request that executes the save. Collective.

    Data-parallel ranks share the same state, and each rank writes a part of it.

    Args:
        state: the state to save; its tensors may change once the request has started to write.
        record: record of the checkpoint; its ``files`` are filled in.

    Raises:
        SaveError: on every rank, here or from the last of the request's functions.
    """
    token = from_main(lambda: uuid.uuid4().hex[:8])
    strategy = AtomicSaveStrategy(record, temporary_name(record.root, token))
    shards, common = save_preprocess(state)
    from_main(lambda: strategy.begin(common))
    data_parallel = parallel_state.get_data_parallel_group(with_context_parallel=True)
    FullyParallelSaveStrategyWrapper(strategy, data_parallel).apply_saving_parallelization(shards)
    return strategy.async_save(shards, strategy.temporary)


@dataclasses.dataclass(frozen=True)
class RankResult:
    """Files that one rank has written, or the rank's error."""

    results: list[WriteResult] = dataclasses.field(default_factory=list)
    files: dict[str, CheckpointFile] = dataclasses.field(default_factory=dict)
    error: str | None = None


class AtomicSaveStrategy(TorchDistSaveShardedStrategy):
    """megatron's torch_dist strategy that also hashes files, and raises errors on all ranks.

    The strategy writes to the folder ``temporary``, which becomes ``record.root`` once complete.
    """

    def __init__(self, record: CheckpointRecord, temporary: Path) -> None:
        super().__init__("torch_dist", 1, thread_count=2)
        self.record, self.temporary = record, temporary

    def begin(self, common: dict[str, Any]) -> None:
        """Create the temporary folder and write the state that is not sharded, on rank 0."""
        with self._save_errors():
            remove_leftovers(self.record.root.parent, glob.escape(self.record.root.name))
            self.temporary.mkdir(parents=True)
            torch.save(common, self.temporary / COMMON_STATE_FNAME)

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path
    ) -> AsyncRequest:
        """Plan the save, with results passed in memory.

        megatron takes its results queue from a module variable. If the variable is not set,
        megatron starts a process of 270 MB in every rank, which survives the rank.
        """
        before = filesystem_async._results_queue
        filesystem_async._results_queue = Handover()
        try:
            return super().async_save(sharded_state_dict, checkpoint_dir, **_OWN_WRITER)
        finally:
            filesystem_async._results_queue = before

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, planned: Any, *own_writer: str
    ) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, planned, *own_writer)
        _, index, ranks = planned
        staged: list[Any] = []

        def stage() -> list[Any]:
            """Copy tensors to the host; keep the copies: freed pinned memory would be reused."""
            staged.extend(request.preload_fn())
            return staged

        def finalize() -> None:
            result = RankResult()  # if this rank has nothing to write
            if writer.write_buckets:
                killed = "the writing process was killed, or memory did not suffice"
                result = writer.results_queue.get() or RankResult(error=killed)
            results = ranks.gather_object(result)
            staged.clear()
            from_main(lambda: self._complete(writer, index, results))

        if request.async_fn is None:  # this rank has nothing to write
            return request._replace(finalize_fns=[finalize])
        return request._replace(
            async_fn=functools.partial(_write_and_hash, [writer.transforms]),
            preload_fn=stage,
            finalize_fns=[finalize],
        )

    def _complete(
        self, writer: FileSystemWriterAsync, index: Metadata, ranks: list[RankResult]
    ) -> None:
        """Write the index and the record, and rename the folder, on rank 0."""
        with self._save_errors():
            for number, rank in enumerate(ranks):
                if rank.error:
                    raise OSError(f"rank {number}: {rank.error}")
            writer.finish(index, [rank.results for rank in ranks])
            save_config(CheckpointingConfig("torch_dist", 1), str(self.temporary))
            written = {name: file for rank in ranks for name, file in rank.files.items()}
            own = hash_files(self.temporary, leave_out=written)
            files = dict(sorted({**written, **own}.items()))
            dataclasses.replace(self.record, root=self.temporary, files=files).save()
            for name in own:
                flush_to_disk(self.temporary / name)
            flush_to_disk(self.temporary)
            replace_folder(self.temporary, self.record.root)
            flush_to_disk(self.record.root.parent)

    @contextlib.contextmanager
    def _save_errors(self) -> Iterator[None]:
        """Remove the temporary folder on errors and raise SaveError."""
        try:
            yield
        except (OSError, RuntimeError, UserError) as error:  # torch raises RuntimeError for files
            shutil.rmtree(self.temporary, ignore_errors=True)
            raise SaveError(
                f"cannot write the checkpoint {self.record.root} ({_reason(error)})"
            ) from error


class Handover:
    """Channel that passes one value of any size from a forked process to its parent.

    The value is passed in anonymous shared memory. A pipe would block the writer until the parent
    reads, and a queue of ``multiprocessing`` needs an additional thread or process.
    """

    def __init__(self) -> None:
        self._memory = os.fdopen(os.memfd_create("handover"), "w+b")

    def put(self, value: Any) -> None:
        """Pass ``value``, if memory suffices; the parent reads it once this process has ended."""
        with contextlib.suppress(MemoryError, OSError):
            pickle.dump(value, self._memory)
            self._memory.flush()

    def get(self) -> Any:
        """Return the value; None if the value is not complete.

        Raising an exception would leave the other ranks waiting in the collective that follows.
        """
        try:
            self._memory.seek(0)
            return pickle.load(self._memory)
        except (EOFError, MemoryError, OSError, pickle.UnpicklingError):
            return None


@_disable_gc()  # in a fork, garbage collection of the parent's CUDA objects fails
def _write_and_hash(
    transforms: list[Any], rank: int, buckets: list[Any], handover: Handover
) -> None:
    """Write and hash one rank's files, then put a RankResult into ``handover``.

    The function runs in this process or in a fork. On the CPU, the fork has a copy of the tensors,
    so that training does not change what is being written.
    """

    def write(number: int, bucket: Any) -> tuple[list[WriteResult], CheckpointFile]:
        """Write one file with the function that megatron runs in a process, and hash it."""
        done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        counted: queue.Queue[int] = queue.Queue()  # megatron takes one item per written file
        counted.put(number)
        FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, done, counted, use_fsync=True
        )
        _, result = done.get_nowait()
        if isinstance(result, Exception):
            raise result
        return result, CheckpointFile.of(Path(bucket[0]))

    try:
        with ThreadPoolExecutor(len(buckets)) as pool:  # one thread per file
            results, files = zip(*pool.map(write, range(len(buckets)), buckets), strict=True)
        names = [name for _, name, _ in buckets]
        result = RankResult(list(itertools.chain(*results)), dict(zip(names, files, strict=True)))
    except Exception as error:
        result = RankResult(error=_reason(error))
    handover.put(result)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "inline_container" in str(error):  # matches torch's error about its zip archive
        return "a file could not be written completely, as on a full disk"
    return first_line(error)
