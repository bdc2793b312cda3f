"""Running a command, with the time it takes and the memory of it and all its children."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from megatron_chameleon.errors import UserError

_SECONDS_BETWEEN_LOOKS = 0.02


class Run(NamedTuple):
    """One run: wall seconds, and the peak of the resident bytes added up over all processes.

    Pages that processes share are counted in each of them.
    """

    seconds: float
    peak_bytes: int


def run(command: Sequence[str]) -> Run:
    """Run a Python script (``command`` begins with its path) to its end.

    Raises:
        UserError: if it fails, with the end of what it wrote.
    """
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, _resident_bytes(process.pid))
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    seconds = time.perf_counter() - begin
    output = process.communicate()[0]
    if process.returncode:
        raise UserError(f"{' '.join(command)} failed: {output[-2000:]}")
    return Run(seconds, peak)


def _resident_bytes(pid: int) -> int:
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.NoSuchProcess:  # it has just ended
        pass
    return total
