"""A process that has imported torch and megatron, and forks a tool run for each request.

These imports take most of a short run's time. In the process for ``cuda``, the device is installed
before these imports.
"""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from tests.distributed.launch import REPOSITORY, environment, fork_ranks, redirect_output
from tests.simulated_cuda import run_tool

Kind = Literal["cpu", "cuda"]
PRELOADED = "megatron_chameleon.training.trainer"


@dataclasses.dataclass(frozen=True)
class Request:
    """A run of a tool.

    Attributes:
        command: the tool's path and its arguments.
        log: output file for stdout and stderr of all ranks.
        synchronizations: output file for host synchronizations on the device; see run_tool.py.
        ranks: number of ranks; one rank runs without a launcher, several ranks run under torchrun's
            launcher.
        environment: additional environment variables.
    """

    command: list[str]
    log: Path
    synchronizations: Path
    ranks: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Driver:
    """Handle of the process, which serves one request at a time."""

    def __init__(self, kind: Kind) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, others_end = context.Pipe()
        self._process = context.Process(target=serve, args=(kind, others_end))
        self._process.start()
        others_end.close()  # so that recv() fails if the process dies

    def run(self, request: Request) -> int:
        """Return the exit status of the run."""
        self._connection.send(request)
        return self._connection.recv()

    def close(self) -> None:
        """Kill the process; no state is lost, since runs are independent."""
        self._process.kill()
        self._process.join()


def serve(kind: Kind, connection: Connection) -> None:
    """Answer each request with the exit status of its run."""
    os.environ.update(environment())
    os.chdir(REPOSITORY)
    if kind == "cuda":
        from tests.simulated_cuda import device

        device.hide_triton()
        device.install()
    importlib.import_module(PRELOADED)
    while True:
        request = connection.recv()
        work = partial(run_rank, kind, request)
        if request.ranks > 1:
            launcher = fork_ranks(request.ranks, request.log, work)
        else:
            launcher = multiprocessing.get_context("fork").Process(
                target=run_alone, args=(request.log, work)
            )
            launcher.start()
        launcher.join()
        connection.send(launcher.exitcode)


def run_alone(log: Path, work: partial[None]) -> None:
    redirect_output(log)
    work()


def run_rank(kind: Kind, request: Request) -> None:
    """Run the tool as one rank, whose output is already redirected."""
    os.environ.update(request.environment)
    tool, *arguments = request.command
    if kind == "cuda":
        run_tool.use_kernels()
        run_tool.run_on_device(Path(tool), arguments, request.synchronizations)
    else:
        run_tool.run_as_main(Path(tool), arguments)
