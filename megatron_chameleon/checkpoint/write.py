"""The part of a save that every rank does: writing its share, and hashing it where it was written.

megatron plans and writes. What is added here: the files are hashed by the process that wrote them,
beside the training where the save is asynchronous; what fails on one rank is told to rank 0, and by
it to all, where megatron would leave the other ranks waiting for a rank that has left; and no
process is started to carry results, which would outlive a rank that is killed, nor one for each
file, which megatron would wait for without end if it is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from megatron_chameleon.artifacts.checkpoint import CheckpointFile
from megatron_chameleon.checkpoint.handover import Handover
from megatron_chameleon.parallel.layout import from_main

Files = dict[str, CheckpointFile]


@dataclasses.dataclass(frozen=True)
class Share:
    """What one rank has written of a checkpoint, or why it could not."""

    results: list[WriteResult] = dataclasses.field(default_factory=list)
    files: Files = dataclasses.field(default_factory=dict)
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Shares:
    """What all ranks have written, on rank 0."""

    writer: FileSystemWriterAsync
    index: Metadata
    shares: list[Share]

    @property
    def problem(self) -> str | None:
        """What went wrong on the first rank where something did."""
        found = ((rank, share.problem) for rank, share in enumerate(self.shares) if share.problem)
        return next((f"rank {rank}: {problem}" for rank, problem in found), None)

    @property
    def files(self) -> Files:
        """All files that the ranks have written."""
        return {name: file for share in self.shares for name, file in share.files.items()}

    def write_index(self) -> None:
        """Write what torch finds its way by. Raises OSError if the system refuses."""
        self.writer.finish(self.index, [share.results for share in self.shares])


class HashingSaveStrategy(TorchDistSaveShardedStrategy):
    """megatron's strategy for torch_dist; ``complete`` is called on rank 0 once all have written.

    What ``complete`` raises as a UserError is raised on every rank.
    """

    def __init__(self, complete: Callable[[Shares], None]) -> None:
        super().__init__("torch_dist", 1)
        self._complete = complete

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path
    ) -> AsyncRequest:
        """As megatron's; the writing hands its results over by memory."""
        with _results_by(Handover()):
            return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, planned: Any
    ) -> AsyncRequest:
        """What megatron asks for when it has planned: the writing, and what comes after it."""
        request = super()._get_save_and_finalize_callbacks(writer, planned)
        _, index, ranks = planned
        staged: list[Any] = []

        def stage() -> list[Any]:
            """Copy to the host, and hold on to it: freed pinned memory would be used again."""
            staged.extend(request.preload_fn())
            return staged

        def finalize() -> None:
            shares = ranks.gather_object(_share_of(writer))
            staged.clear()
            from_main(lambda: self._complete(Shares(writer, index, shares)))

        if request.async_fn is None:  # this rank has nothing to write
            return request._replace(finalize_fns=[finalize])
        return request._replace(
            async_fn=_WriteAndHash([writer.transforms]),
            preload_fn=stage,
            finalize_fns=[finalize],
        )


@contextlib.contextmanager
def _results_by(handover: Handover) -> Iterator[None]:
    """A block in which megatron plans to hand over the results of writing by ``handover``.

    It takes its queue from a variable of the module, and no other by argument. If there is none, it
    starts a process for one, of 270 MB in every rank, which stays when the rank is killed.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = handover
    try:
        yield
    finally:
        filesystem_async._results_queue = before


@dataclasses.dataclass(frozen=True)
class _Written:
    """What the process that writes has to say: megatron's results, and the hashes."""

    results: Any
    files: Files


class _WriteAndHash:
    """Called in this process, or in one that was forked from it with a copy of all tensors.

    On the CPU that copy is what keeps training from changing what is being written.
    """

    def __init__(self, transforms: list[Any]) -> None:
        self._transforms = transforms

    def __call__(self, rank: int, buckets: list[Any], handover: Handover) -> None:
        """Write, then hand over the hashes, or the words for what went wrong."""
        try:
            results = self._write(buckets)
            files = hash_written([Path(path) for path, *_ in buckets])
            found: _Written | str = _Written(results, files)
        except Exception as error:
            found = first_line(error)
        handover.put(found)

    def _write(self, buckets: list[Any]) -> dict[int, Any]:
        """Write each file in a thread, by megatron's function for a process.

        Raises:
            Exception: what it was given by that function for the first file that has none.
        """
        done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        begun: queue.Queue[int] = queue.Queue()  # megatron counts by it, as it would processes

        def write(number: int) -> None:
            begun.put(number)
            FileSystemWriterAsync.write_preloaded_data(
                self._transforms, number, buckets[number], done, begun, use_fsync=True
            )

        # In a forked process, collecting what the first one has on a GPU would be an error.
        with _without_collection(), ThreadPoolExecutor(len(buckets)) as pool:
            list(pool.map(write, range(len(buckets))))
        outcomes = dict(sorted(done.get_nowait() for _ in buckets))
        for outcome in outcomes.values():
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def hash_written(paths: list[Path]) -> Files:
    """Hash files that were just written, at the same time: hashing lets other threads run."""
    with ThreadPoolExecutor(len(paths)) as pool:
        files = pool.map(CheckpointFile.of, paths)
        return {path.name: file for path, file in zip(paths, files, strict=True)}


def first_line(error: BaseException) -> str:
    """What went wrong, on one line: the system's words where it was the system."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "inline_container" in str(error):  # torch's archive, in words for its programmers
        return "a file could not be written to its end, as on a full disk"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _share_of(writer: FileSystemWriterAsync) -> Share:
    """What this rank's processes have said, all of them having ended."""
    if not writer.write_buckets:
        return Share()
    found = writer.results_queue.get()
    if found is None:
        return Share(problem="the process that writes has ended without a word")
    if isinstance(found, str):
        return Share(problem=found)
    # megatron finds out from them whether all was written.
    writer.results_queue = queue.SimpleQueue()
    writer.results_queue.put(found.results)
    results = writer.retrieve_write_results()
    if isinstance(results, tuple):  # an exception and where it was raised
        return Share(problem=first_line(results[0].__cause__ or results[0]))
    return Share(results, found.files)
