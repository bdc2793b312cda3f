"""The folder of a run: its lock, and the replacement of an old run by ``--overwrite``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import from_main

LOCK_NAME = "run.lock"
FRESH_START = (
    "choose another folder (--run-dir, --work-dir or --output), or delete it to start from scratch "
    "(megatron-chameleon pretrain_gpt: --overwrite)"
)
"""Hint at the end of messages about a run folder that holds another run."""
# --overwrite moves the old run to this folder inside the run folder, since the run folder itself
# may be a mount point or a link. run.json is moved last and restored first, so that a moved
# run.json shows that the move is complete.
_REPLACED = ".replaced"


@contextlib.contextmanager
def on_main(context: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """Enter the context manager ``context`` on rank 0 only. Collective.

    Raises:
        UserError: on every rank, if entering raises it on rank 0.
    """
    with contextlib.ExitStack() as stack:
        from_main(lambda: stack.enter_context(context))
        yield


@contextlib.contextmanager
def locked_run_folder(folder: Path) -> Iterator[None]:
    """Lock ``folder`` against other jobs during the block.

    The folder is created if needed; a created folder is removed if the block leaves it empty. On a
    file system without locks, other jobs are not excluded.

    Raises:
        UserError: if another job holds the lock, or the folder cannot be created.
    """
    created, path = not folder.exists(), folder / LOCK_NAME
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("ab+", buffering=0)
    with lock:
        try:
            # This is a POSIX lock because forked processes do not inherit it, and the forked
            # processes that write a checkpoint may outlive this one by some seconds.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            lock.seek(0)
            holder = lock.read(256).decode(errors="replace").strip()
            raise UserError(
                f"{folder} is in use by another job ({holder}): wait for it, end it, or choose "
                f"another folder; if no such job exists, delete {path}"
            ) from error
        except OSError:  # the file system has no locks
            pass
        if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
            raise UserError(f"{folder} was in use by another job, which has just ended; try again")
        with contextlib.suppress(OSError):  # a full disk does not affect the lock
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        try:
            with writing(folder):
                _restore(folder)
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.truncate(0)
                if created and list(folder.iterdir()) == [path]:
                    shutil.rmtree(folder)


@contextlib.contextmanager
def starting_run(folder: Path, *, overwrite: bool) -> Iterator[None]:
    """Context manager for the first writes of a run to its locked ``folder``.

    With ``overwrite``, the old run is moved aside before the block and deleted after it. If the
    block raises, the folder is restored at once; if the process is killed, it is restored when the
    folder is next locked.

    Raises:
        UserError: if the old run cannot be moved.
    """
    before, replaced, moved = set(folder.iterdir()), folder / _REPLACED, False
    try:
        if overwrite and TrainingRun.exists(folder):
            if replaced.exists():
                raise UserError(
                    f"{replaced} holds an earlier run that could not be deleted: close the "
                    "programs that have its files open, and delete it"
                )
            with writing(replaced):
                replaced.mkdir()
                for path in sorted(_contents(folder), key=_is_record):
                    os.replace(path, replaced / path.name)
            moved = True
        yield
    except BaseException:
        for path in _contents(folder):
            if moved or path not in before:
                _remove(path)
        _restore(folder)
        raise
    _restore(folder)


def _restore(folder: Path) -> None:
    """Delete the old run if the new run has started; otherwise move the old run back."""
    replaced = folder / _REPLACED
    if not replaced.exists():
        return
    if TrainingRun.exists(replaced):
        if TrainingRun.exists(folder):
            with contextlib.suppress(OSError):  # deletion is retried when the folder is next locked
                for path in sorted(replaced.iterdir(), key=_is_record):
                    _remove(path)
                replaced.rmdir()
            return
        for path in _contents(folder):
            _remove(path)
    for path in sorted(replaced.iterdir(), key=_is_record, reverse=True):
        os.replace(path, folder / path.name)
    replaced.rmdir()


def _contents(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name not in (LOCK_NAME, _REPLACED)]


def _is_record(path: Path) -> bool:
    return path.name == TrainingRun.FILE_NAME


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
