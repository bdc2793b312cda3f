"""What happens to the folders of checkpoints as newer ones come: which is the latest, which go."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_chameleon.artifacts.checkpoint import (
    FOLDER_NAME,
    LATEST_NAME,
    all_checkpoint_folders,
    checkpoint_folders,
    step_folder,
)
from megatron_chameleon.artifacts.files import (
    flush_to_disk,
    put_all_back,
    put_back,
    remove_replaced,
    replacing,
)

UNUSED_PREFIX = "unused-"


def temporary_name(folder: Path, token: str) -> Path:
    """What ``folder`` is called until it is complete; ``token`` tells one try from another.

    So what processes of a killed run still write cannot get among the files of the next try.
    """
    return folder.with_name(f".{folder.name}.{token}.tmp")


def remove_leftovers(folder: Path) -> None:
    """Delete what was left by tries to write ``folder`` that did not come to their end.

    Where one was cut off while it replaced the folder, the old one is back.

    Raises:
        OSError: if the system refuses that.
    """
    put_back(folder)
    remove_replaced(folder)
    # A longer name, such as that of another folder with a dot in it, is somebody else's.
    ours = re.compile(rf"\.{re.escape(folder.name)}\.[^.]+\.tmp")
    _remove(path for path in folder.parent.glob(".*.tmp") if ours.fullmatch(path.name))


def remove_leftovers_of_run(run_dir: Path) -> None:
    """As :func:`remove_leftovers`, for every checkpoint of a run, and half-written files too.

    No other process may be writing the run.
    """
    put_all_back(run_dir / FOLDER_NAME)
    for folder in all_checkpoint_folders(run_dir):
        remove_replaced(folder)
    _remove((run_dir / FOLDER_NAME).glob(".step-*.tmp"))
    for path in (*run_dir.glob(".*.tmp"), *(run_dir / FOLDER_NAME).glob(f".{LATEST_NAME}.*.tmp")):
        path.unlink(missing_ok=True)


def finish_latest(run_dir: Path) -> None:
    """Make the checkpoint the latest that was complete when a job was killed before it said so.

    No other process may be writing the run.

    Raises:
        UserError: if the file that says so cannot be written.
    """
    known = checkpoint_folders(run_dir)[-1:]
    complete = {folder.name: folder for folder in all_checkpoint_folders(run_dir)}
    for path in (run_dir / FOLDER_NAME).glob(f".{LATEST_NAME}.*.tmp"):
        # A loss of power may have left it empty.
        meant = complete.get(path.read_text(encoding="utf-8", errors="replace").strip())
        if meant and [meant] > known:
            with naming_latest(meant):
                pass


@contextlib.contextmanager
def naming_latest(folder: Path) -> Iterator[None]:
    """A block that gives ``folder`` its name; it then is the latest checkpoint of its run.

    The file that says so is written before the block and takes its place after it, so that there is
    room for it, and so that it never names what is not there.

    Raises:
        UserError: if it cannot be written; the block is then not entered.
    """
    with replacing(folder.with_name(LATEST_NAME)) as temporary:
        temporary.write_text(folder.name + "\n", encoding="utf-8")
        flush_to_disk(temporary)  # finish_latest reads it if the job is killed in the block
        yield


def keep_last(run_dir: Path, count: int) -> None:
    """Delete the oldest checkpoints of a run until ``count`` are left; 0 keeps all.

    Raises:
        OSError: if the system refuses; what is left then is whole.
    """
    folders = checkpoint_folders(run_dir)
    for folder in folders[: max(0, len(folders) - count)] if count else []:
        doomed = temporary_name(folder, "old")
        os.replace(folder, doomed)  # at once: half a checkpoint never has a checkpoint's name
        shutil.rmtree(doomed)


def go_back_to(run_dir: Path, step: int) -> list[Path]:
    """Make the checkpoint of ``step`` the latest of a run; newer ones get other names.

    They are damaged, or of steps that the run has been taken back from. Nothing reads them again.

    Returns:
        where they lie now.
    """
    chosen = step_folder(run_dir, step)
    newer = [folder for folder in all_checkpoint_folders(run_dir) if folder.name > chosen.name]
    moved = [_free_name(folder.with_name(UNUSED_PREFIX + folder.name)) for folder in newer]
    if newer:
        with naming_latest(chosen):
            pass
    for folder, unused in zip(newer, moved, strict=True):
        os.replace(folder, unused)
    return moved


def _free_name(folder: Path) -> Path:
    """``folder``, or with a number after it where that is taken: what is kept is kept."""
    names = itertools.chain([folder.name], (f"{folder.name}-{n}" for n in itertools.count(2)))
    return next(path for path in map(folder.with_name, names) if not path.exists())


def _remove(folders: Iterator[Path]) -> None:
    for folder in list(folders):
        shutil.rmtree(folder, ignore_errors=True)
