"""Run a command with a time limit, time a command, or measure the memory of its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from megatron_chameleon.errors import UserError

SECONDS_TO_STOP = 10
_SECONDS_BETWEEN_SAMPLES = 0.02


def run_within(
    command: Sequence[str],
    seconds: float,
    output: IO[bytes],
    *,
    cwd: Path,
    environment: Mapping[str, str] = os.environ,
) -> int | None:
    """Run ``command``; when it ends, or after ``seconds``, stop all processes that it started.

    The processes get SIGTERM, and SIGKILL after ``SECONDS_TO_STOP``. They are found by a variable
    in their environment, since torchrun's ranks run in separate sessions and may outlive their
    parent.

    Returns:
        The exit status, or None after ``seconds``.
    """
    mark = f"RUN_WITHIN_{uuid.uuid4().hex}"
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**environment, mark: "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _stop_marked(mark)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process may hang in a driver
            process.wait(1)


def _stop_marked(mark: str) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in _marked(mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        end = time.monotonic() + SECONDS_TO_STOP
        while _marked(mark) and time.monotonic() < end:
            time.sleep(0.1)


def _marked(mark: str) -> list[psutil.Process]:
    """Return the processes with ``mark`` in their environment, except zombies."""
    every = psutil.process_iter(["environ"])
    return [process for process in every if mark in (process.info["environ"] or ())]


def seconds_of(command: Sequence[str]) -> float:
    """Return the wall seconds of a Python script; ``command`` begins with its path.

    Raises:
        UserError: if it fails, with the end of its output.
    """
    begin = time.perf_counter()
    _run(command, lambda process: None)
    return time.perf_counter() - begin


def peak_bytes_of(command: Sequence[str]) -> int:
    """Return the peak resident memory of a Python script in bytes, summed over its processes.

    A page that processes share is counted once for each of them. Sampling takes a few percent of a
    core, so a run is either measured or timed.

    Raises:
        UserError: if it fails, with the end of its output.
    """
    peak = 0

    def sample(process: subprocess.Popen[str]) -> None:
        nonlocal peak
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                tree = [parent, *parent.children(recursive=True)]
                peak = max(peak, sum(each.memory_info().rss for each in tree))
            time.sleep(_SECONDS_BETWEEN_SAMPLES)

    _run(command, sample)
    return peak


def _run(command: Sequence[str], during: Callable[[subprocess.Popen[str]], None]) -> None:
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        during(process)
        output = process.communicate()[0]
    if process.returncode:
        raise UserError(f"{' '.join(command)} failed: {output[-2000:]}")
