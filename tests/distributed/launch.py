"""Launch ranks by torchrun or by fork, and kill all remaining processes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def torchrun(num_ranks: int, script: Path | str, *arguments: str) -> list[str]:
    """Return the torchrun command that starts ``script`` on local ranks at a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(num_ranks), str(REPOSITORY / script), *arguments]


def flags(options: Any) -> list[str]:
    """Return the command line for a dataclass of options, nested groups included."""
    found: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        name = "--" + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            found += flags(value)
        elif isinstance(value, bool) and field.default is True:
            found += [] if value else ["--no-" + name.removeprefix("--")]
        elif isinstance(value, bool):
            found += [name] if value else []
        elif isinstance(value, tuple):  # an option that can be repeated
            found += [word for group in value for word in (name, *group)]
        elif value is not None:
            found += [name, str(value)]
    return found


def start(command: list[str], log: Path, folder: Path = REPOSITORY) -> subprocess.Popen[bytes]:
    """Start ``command`` in ``folder`` as a process group's leader, with its output in ``log``."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Return the exit status, after killing the remaining processes of the group."""
    try:
        return process.wait(seconds)
    finally:
        kill_group(process)


def wait_for_step(log: Path, step: int, is_alive: Callable[[], bool]) -> None:
    """Wait until ``step`` is logged; fail if the process ends earlier."""
    while not (log.exists() and re.search(rf"^step +{step}/", log.read_text(), re.MULTILINE)):
        assert is_alive(), log.read_text()
        time.sleep(0.005)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all processes have ended
    process.wait()


def environment() -> Mapping[str, str]:
    """Return the environment for a new launch: one thread per rank, no GPU.

    It is this process's environment without the variables of a launcher. torch.compile is disabled,
    so that ranks do not import TorchInductor, which takes a second. (Dynamo is imported anyway.)
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }


def fork_ranks(num_ranks: int, log: Path, function: Callable[[], Any]) -> Any:
    """Fork torchrun's launcher, which forks the ranks; return its process.

    This process has imported everything, so a launch takes one second instead of ten. This process
    must not have started a thread. The launcher leads a process group; output goes to ``log``.
    """
    launcher = multiprocessing.get_context("fork").Process(
        target=_launch, args=(num_ranks, log, function)
    )
    launcher.start()
    return launcher


def _launch(num_ranks: int, log: Path, function: Callable[[], Any]) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    redirect_output(log)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, _rank)(function)


def _rank(function: Callable[[], Any]) -> None:
    """Call ``function``, and return on success, since torchrun does not expect SystemExit."""
    try:
        function()
    except SystemExit as leaving:
        if leaving.code:
            raise


def redirect_output(log: Path) -> None:
    """Append this process's output to ``log``."""
    with log.open("ab") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
