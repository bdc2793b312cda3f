"""Lines for people while a run goes on."""

from __future__ import annotations

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
