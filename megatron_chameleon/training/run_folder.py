"""The folder of a run: its lock, and the deletion of an old run by ``--overwrite``."""

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
    "(tools/pretrain_gpt.py: --overwrite)"
)
"""Hint at the end of messages about a run folder that holds another run."""


@contextlib.contextmanager
def on_main(context: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """Enter ``context`` on rank 0 only. Collective.

    Raises:
        UserError: on every rank, if entering raises it on rank 0.
    """
    with contextlib.ExitStack() as stack:
        from_main(lambda: stack.enter_context(context))
        yield


@contextlib.contextmanager
def locked_run_folder(folder: Path) -> Iterator[None]:
    """Lock ``folder`` against other jobs during the block.

    The folder is created if needed, and removed again if the block leaves it empty. On a file
    system without locks, other jobs are not kept out.

    Raises:
        UserError: if another job holds the lock, or the folder cannot be created.
    """
    created, path = not folder.exists(), folder / LOCK_NAME
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("ab+", buffering=0)
    with lock:
        try:
            # A POSIX lock, which is not inherited by the forked processes that write a checkpoint
            # and may outlive this one by some seconds.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            lock.seek(0)
            holder = lock.read(256).decode(errors="replace").strip()
            raise UserError(
                f"{folder} is in use by another job ({holder}): wait for it, end it, or choose "
                f"another folder; if there is no such job, delete {path}"
            ) from error
        except OSError:  # a file system without locks
            pass
        with contextlib.suppress(OSError):  # disk full; the lock is held anyway
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.truncate(0)
                if created and list(folder.iterdir()) == [path]:
                    shutil.rmtree(folder)


def delete_run(folder: Path) -> None:
    """Delete the run in ``folder``, if there is one, except for the lock.

    run.json is deleted last: if the process is killed, the folder still counts as a run.

    Raises:
        UserError: if a file cannot be deleted.
    """
    if not TrainingRun.exists(folder):
        return
    with writing(folder):
        for path in sorted(folder.iterdir(), key=lambda path: path.name == TrainingRun.FILE_NAME):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK_NAME:
                path.unlink()
