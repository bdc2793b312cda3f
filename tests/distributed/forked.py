"""Several launches of ranks by one process that has imported everything: each takes a second."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch_forked(num_ranks: int, log: Path, function: Callable[..., None], *given: Any) -> int:
    """Let so many ranks call ``function(*given)``; returns the launcher's exit status.

    The launcher is torchrun's own. It is forked from this process, as the ranks are from it, and
    what they say goes to ``log``. This process must not have started a thread.
    """
    launcher = multiprocessing.get_context("fork").Process(
        target=_launch, args=(num_ranks, log, function, given)
    )
    launcher.start()
    launcher.join()
    assert launcher.exitcode is not None
    return launcher.exitcode


def _launch(num_ranks: int, log: Path, function: Callable[..., None], given: tuple[Any]) -> None:
    with log.open("wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
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
    elastic_launch(config, function)(*given)
