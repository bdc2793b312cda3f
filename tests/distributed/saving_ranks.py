"""What the ranks of saving_cases.py do; as a program, launches of a run whose ranks are killed.

    python saving_ranks.py ROOT NAME MOMENT...

launches the run NAME below ROOT once for each moment, on two ranks, and kills rank 1 with SIGKILL
then: "in-save", when it has written its part of the checkpoint of step 6 and before it tells so;
"beside-training", before the tenth step, while the checkpoint of the ninth is being written; or
"never". What each launch says, and what it leaves behind, lies in ROOT/NAME-MOMENT.log and .json.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_chameleon.artifacts.checkpoint import FOLDER_NAME, checkpoint_folders
from tests.distributed.forked import launch_forked
from tests.distributed.layout_cases import Places
from tests.distributed.saving_cases import (
    FULL_FROM,
    FULL_UNTIL,
    KILLED_RANK,
    KILLS_ITSELF,
    SAVING,
    SMALLER_THAN_WEIGHTS,
    saving_options,
)
from tests.full_disk import largest_file_size

NUM_RANKS = 2
SECONDS_OF_A_SLOW_WRITE = 3.0
WRITER = "megatron_chameleon.checkpoint.save"


def train_saving(places: Places, name: str) -> None:
    """Train; where the case asks for it, one rank's disk is full for some of the steps."""
    from megatron_chameleon.training.pretrain import pretrain

    case = SAVING[name]
    full = contextlib.ExitStack()
    begin = partial(full.enter_context, largest_file_size(SMALLER_THAN_WEIGHTS))
    acts: dict[int, Callable[[], object]] = {FULL_FROM: begin, FULL_UNTIL: full.close}
    with full, before_steps(acts if case.full_rank == int(os.environ["RANK"]) else {}):
        pretrain(saving_options(places, name, async_save=case.async_save))


@contextlib.contextmanager
def before_steps(acts: dict[int, Callable[[], object]], first: int = 1) -> Iterator[None]:
    """A block whose training does something before some steps; it begins with step ``first``."""
    from megatron_chameleon.training import step

    steps = itertools.count(first)

    def train_step(*arguments: Any) -> Any:
        acts.get(next(steps), lambda: None)()
        return step.train_step(*arguments)

    with mock.patch("megatron_chameleon.training.loop.train_step", train_step):
        yield


def train_and_be_killed(places: Places, name: str, moment: str) -> None:
    """Go on with the run ``name``, and kill rank 1 at the moment."""
    from megatron_chameleon.training.pretrain import pretrain

    done = len(checkpoint_folders(places.run(name))) * 3
    with contextlib.ExitStack() as stack:
        if os.environ["RANK"] == str(KILLED_RANK) and moment == "in-save":
            stack.enter_context(killed_when_written(step=6))
        if moment == "beside-training":
            stack.enter_context(slow_writes())
            mine = os.environ["RANK"] == str(KILLED_RANK)
            stack.enter_context(before_steps({10: kill_myself} if mine else {}, first=done + 1))
        pretrain(saving_options(places, name, async_save=moment == "beside-training"))


def kill_myself() -> None:
    print(KILLS_ITSELF, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def killed_when_written(step: int) -> Iterator[None]:
    """This process is killed where it would tell the hashes of its files of that step."""
    from megatron_chameleon.checkpoint import save

    def hash_and_die(paths: list[Path]) -> Any:
        if f"step-{step:08d}" in paths[0].parent.name:
            kill_myself()
        return hash_written(paths)

    hash_written = save.hash_written
    with mock.patch(f"{WRITER}.hash_written", hash_and_die):
        yield


@contextlib.contextmanager
def slow_writes() -> Iterator[None]:
    """Writing the checkpoint of step 9 takes a few seconds longer, on every rank."""
    from megatron_chameleon.checkpoint import save

    def hash_late(paths: list[Path]) -> Any:
        if "step-00000009" in paths[0].parent.name:
            time.sleep(SECONDS_OF_A_SLOW_WRITE)
        return hash_written(paths)

    hash_written = save.hash_written
    with mock.patch(f"{WRITER}.hash_written", hash_late):
        yield


def launch_and_tell(places: Places, name: str, moment: str) -> None:
    """Launch the run once, and write down how that ended."""
    log = places.root / f"{name}-{moment}.log"
    status = launch_forked(NUM_RANKS, log, train_and_be_killed, places, name, moment)
    left = sorted(path.name for path in (places.run(name) / FOLDER_NAME).iterdir())
    log.with_suffix(".json").write_text(json.dumps({"status": status, "left": left}))


if __name__ == "__main__":
    import megatron_chameleon.training.pretrain  # noqa: F401  (for all of the launches, once)

    root, run, *moments = sys.argv[1:]
    for moment in moments:
        launch_and_tell(Places(Path(root)), run, moment)
