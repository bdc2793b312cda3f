"""The folder of a run: one job writes it at a time; an old run goes when a new one has begun."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.artifacts.training_run import TrainingRun
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import from_main

LOCK_NAME = "run.lock"
FRESH_START = (
    "choose another folder (--run-dir, --work-dir or --output), or delete it to start from scratch "
    "(tools/pretrain_gpt.py: --overwrite)"
)
"""How to fix a run folder that holds another run, to end a message."""
# What is replaced lies in the run's own folder, which may be a mount point or a link. It has the
# second name when all of it is there, so that what a killed job left can be told apart.
_BEING_MOVED, _REPLACED = ".being-replaced", ".replaced"


@contextlib.contextmanager
def locked_run_folder(folder: Path) -> Iterator[None]:
    """Keep other jobs from writing ``folder`` during the block. Every rank calls this.

    It is made where it is missing, and removed again if the block leaves it empty. Where the disk
    has no locks, nobody is kept out.

    Raises:
        UserError: on every rank, if another job holds it, or it cannot be made.
    """
    with contextlib.ExitStack() as held:
        from_main(lambda: held.enter_context(_locked_folder(folder)))
        yield


@contextlib.contextmanager
def starting_run(folder: Path, *, overwrite: bool) -> Iterator[None]:
    """A block that writes the first record of a run in ``folder``. Every rank calls this.

    With ``overwrite``, the run that the folder holds is set aside before it and deleted after it.
    If the block raises on the first rank, or the process is killed in it and the folder is held
    again, all is as it was before.

    Raises:
        UserError: on every rank, if the old run cannot be set aside.
    """
    with contextlib.ExitStack() as begun:
        from_main(lambda: begun.enter_context(_starting_run(folder, overwrite)))
        yield


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    made = not folder.exists()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder / LOCK_NAME)
    try:
        with writing(folder):
            _restore(folder)
        yield
    finally:
        (folder / LOCK_NAME).unlink(missing_ok=True)
        os.close(lock)
        if made:
            with contextlib.suppress(OSError):  # it holds a run now
                folder.rmdir()


def _locked(path: Path) -> int:
    """A descriptor of the file ``path``, which holds its lock until it is closed.

    The lock is POSIX's: processes that are forked from this one to write a checkpoint, and outlive
    it by some seconds, do not hold it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.read(descriptor, 256).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(
                f"{path.parent} is in use by another job ({holder}): wait for it, end it, or "
                f"choose another folder; if there is no such job, delete {path}"
            ) from error
        except OSError:  # a disk without locks
            pass
        if _is_at(descriptor, path):
            with contextlib.suppress(OSError):  # the disk is full; the lock holds without
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return descriptor
        os.close(descriptor)  # the job that held it has left meanwhile, and removed the file


def _is_at(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


@contextlib.contextmanager
def _starting_run(folder: Path, overwrite: bool) -> Iterator[None]:
    if overwrite and TrainingRun.exists(folder):
        with writing(folder):
            _move_aside(folder)
    before = set(folder.iterdir())
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before:
            _remove(path)
        _restore(folder)
        raise
    shutil.rmtree(folder / _REPLACED, ignore_errors=True)


def _move_aside(folder: Path) -> None:
    """Move all that the folder holds of runs, or nothing.

    Raises:
        UserError: if the rest of a run that was replaced before cannot be deleted.
        OSError: if the system refuses.
    """
    aside, replaced = folder / _BEING_MOVED, folder / _REPLACED
    if replaced.exists():
        raise UserError(
            f"{replaced}, what is left of a run that was overwritten, cannot be deleted: is one of "
            "its files still open, by TensorBoard perhaps? Delete it, then start again"
        )
    try:
        aside.mkdir()
        for path in _contents(folder):
            os.replace(path, aside / path.name)
        os.replace(aside, replaced)
    except BaseException:
        _restore(folder)
        raise


def _restore(folder: Path) -> None:
    """Bring back what was set aside for a run that did not begin; delete it if that one did."""
    aside, replaced = folder / _BEING_MOVED, folder / _REPLACED
    # With both, what was replaced is a rest of before, which could not be deleted.
    if replaced.exists() and not aside.exists():
        if TrainingRun.exists(folder):
            shutil.rmtree(replaced, ignore_errors=True)
            return
        for path in _contents(folder):
            _remove(path)
        os.replace(replaced, aside)
    if aside.exists():
        for path in list(aside.iterdir()):
            os.replace(path, folder / path.name)
        aside.rmdir()


def _contents(folder: Path) -> list[Path]:
    """What the folder holds of runs."""
    ours = (LOCK_NAME, _BEING_MOVED, _REPLACED)
    return [path for path in folder.iterdir() if path.name not in ours]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
