"""The part of a save that every rank does: writing its share, and hashing it where it was written.

megatron plans and writes. What is added here: the files are hashed by the process that wrote them,
beside the training where the save is asynchronous; and what fails on one rank is told to rank 0,
and by it to all, where megatron would leave the other ranks waiting for a rank that has left.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from megatron_chameleon.artifacts.checkpoint import CheckpointFile
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

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, planned: Any
    ) -> AsyncRequest:
        """What megatron asks for when it has planned: the writing, and what comes after it."""
        request = super()._get_save_and_finalize_callbacks(writer, planned)
        _, index, ranks = planned
        receiver, sender = multiprocessing.Pipe(duplex=False)
        staged: list[Any] = []

        def stage() -> list[Any]:
            """Copy to the host, and hold on to it: freed pinned memory would be used again."""
            staged.extend(request.preload_fn())
            return staged

        def finalize() -> None:
            shares = ranks.gather_object(_share_of(writer, receiver))
            staged.clear()
            from_main(lambda: self._complete(Shares(writer, index, shares)))

        if request.async_fn is None:  # this rank has nothing to write
            return request._replace(finalize_fns=[finalize])
        return request._replace(
            async_fn=_WriteAndHash(request.async_fn, sender),
            preload_fn=stage,
            finalize_fns=[finalize],
        )


class _WriteAndHash:
    """Called in this process, or in one that was forked from it with a copy of all tensors.

    On the CPU that copy is what keeps training from changing what is being written.
    """

    def __init__(self, write: Callable[..., None], sender: Connection) -> None:
        self._write, self._sender = write, sender

    def __call__(self, rank: int, buckets: list[Any], queue: Any) -> None:
        """Write, then send the hashes, or the words for what went wrong; raises nothing."""
        try:
            self._write(rank, buckets, queue)
            found: Files | str = hash_written([Path(path) for path, *_ in buckets])
        except Exception as error:
            found = first_line(error)
        self._sender.send(found)


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


def _share_of(writer: FileSystemWriterAsync, receiver: Connection) -> Share:
    """What this rank's processes have said, all of them having ended."""
    results = writer.retrieve_write_results()
    if isinstance(results, tuple):  # an exception and where it was raised
        return Share(problem=first_line(results[0].__cause__ or results[0]))
    if not writer.write_buckets:
        return Share(results)
    if not receiver.poll():
        return Share(problem="the process that writes has ended without a word")
    files = receiver.recv()
    return Share(problem=files) if isinstance(files, str) else Share(results, files)
