"""Lines for people while a run goes on."""

from __future__ import annotations

import os
import sys

from megatron_chameleon.artifacts.files import NO_ROOM


def say(line: str) -> None:
    """Print ``line`` at once.

    Where standard output goes to a disk that is full, the run goes on without: metrics.jsonl gets
    the figures as soon as there is room.
    """
    try:
        print(line, flush=True)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _drop_what_waits()


def _drop_what_waits() -> None:
    """Empty the buffer of standard output, which would fail whoever flushes it next.

    Starting a process does, and with it saving a checkpoint.
    """
    descriptor = sys.stdout.fileno()
    kept, nowhere = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    sys.stdout.flush()
    os.dup2(kept, descriptor)
    os.close(kept)
    os.close(nowhere)
