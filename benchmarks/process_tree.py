"""Running a command, with the time it takes and the memory of it and all its children."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_chameleon.errors import UserError

_SECONDS_BETWEEN_LOOKS = 0.02


def seconds_of(command: Sequence[str]) -> float:
    """Wall seconds of a Python script (``command`` begins with its path), which nobody looks at.

    Raises:
        UserError: if it fails, with the end of what it wrote.
    """
    begin = time.perf_counter()
    process = _started(command)
    output = process.communicate()[0]
    seconds = time.perf_counter() - begin
    _check(process, command, output)
    return seconds


def peak_bytes_of(command: Sequence[str]) -> int:
    """The peak of the resident bytes added up over all processes of a Python script.

    Pages that processes share are counted in each of them. To look takes a few percent of a core,
    so a run is looked at or timed.

    Raises:
        UserError: if it fails, with the end of what it wrote.
    """
    process = _started(command)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _resident_bytes(process.pid))
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    _check(process, command, process.communicate()[0])
    return peak


def _started(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _check(process: subprocess.Popen[str], command: Sequence[str], output: str) -> None:
    if process.returncode:
        raise UserError(f"{' '.join(command)} failed: {output[-2000:]}")


def _resident_bytes(pid: int) -> int:
    """Of a process and all below it. Read from /proc alone: to look must not take a core's time."""
    try:
        own = _pages(pid)
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = " ".join((thread / "children").read_text() for thread in threads).split()
        # A child that has yet to become the program it was made for has its parent's memory.
        others = [child for child in map(int, children) if _pages(child) != own]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
    return own[1] * resource.getpagesize() + sum(map(_resident_bytes, others))


def _pages(pid: int) -> list[int]:
    """Of its address space, those that are resident, and more."""
    return list(map(int, Path(f"/proc/{pid}/statm").read_text().split()))
