"""A process with all imports done, which forks a tool run for each request.

    python -m tests.pretended_cuda.driver {cpu,cuda}

Importing torch and megatron takes most of a short run's time; here it is done once, with the
device installed before for ``cuda``. Requests are lines of JSON on stdin, as :class:`Request` has
them; for each, the run's exit status is a line on stdout.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from tests.distributed.launch import REPOSITORY, environment, fork_ranks, redirect_output
from tests.pretended_cuda import run_tool

Kind = Literal["cpu", "cuda"]
PRELOADED = "megatron_chameleon.training.trainer"
MODULE = "tests.pretended_cuda.driver"


@dataclasses.dataclass(frozen=True)
class Request:
    """A run of a tool.

    Attributes:
        command: the tool's path and its arguments.
        log: output file for stdout and stderr of all ranks.
        synchronizations: output file for host synchronizations on the device; see run_tool.py.
        ranks: 1 runs without a launcher, more with torchrun's.
        environment: additional environment variables.
    """

    command: list[str]
    log: str
    synchronizations: str | None = None
    ranks: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Driver:
    """The tests' handle of the process, which answers requests in order."""

    def __init__(self, kind: Kind) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, kind],
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, request: Request) -> None:
        """Start a run; call :meth:`finish` before the next one."""
        assert self._process.stdin is not None
        print(json.dumps(dataclasses.asdict(request)), file=self._process.stdin, flush=True)

    def finish(self) -> int:
        """Wait for the exit status of the run."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        assert answer, f"the driver exited with status {self._process.wait()}"
        return int(answer)

    def close(self) -> None:
        """Kill the process, which has no state between runs."""
        self._process.kill()
        self._process.communicate()


def main(kind: Kind) -> None:
    """Serve requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    if kind == "cuda":
        from tests.pretended_cuda import device

        device.hide_triton()
        device.install()
    importlib.import_module(PRELOADED)
    for line in sys.stdin:
        print(run(kind, Request(**json.loads(line))), file=answers, flush=True)


def run(kind: Kind, request: Request) -> int:
    """Run the tool in forked processes; returns the exit status."""
    if request.ranks > 1:
        launcher = fork_ranks(request.ranks, Path(request.log), partial(run_rank, kind, request))
        launcher.join()
        return int(launcher.exitcode)
    process = multiprocessing.get_context("fork").Process(target=run_alone, args=(kind, request))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_alone(kind: Kind, request: Request) -> None:
    """Run the tool in this forked process, with its output in the log."""
    redirect_output(Path(request.log))
    run_rank(kind, request)


def run_rank(kind: Kind, request: Request) -> None:
    """Run the tool as one rank, whose output is already redirected."""
    os.environ.update(request.environment)
    tool, *arguments = request.command
    if kind == "cuda":
        run_tool.use_kernels()
        path = request.synchronizations
        run_tool.run_on_device(Path(tool), arguments, None if path is None else Path(path))
    else:
        run_tool.run_as_main(Path(tool), arguments)


if __name__ == "__main__":
    main(sys.argv[1])  # type: ignore[arg-type]
