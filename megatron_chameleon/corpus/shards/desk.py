"""A folder for what one process has half-written, that goes with the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from megatron_chameleon.artifacts.files import writing

_ATTEMPTS = 100


@contextlib.contextmanager
def desk_in(folder: Path) -> Iterator[Path]:
    """Yield a new folder in ``folder`` that no other process writes to; remove it in the end.

    What killed processes of this machine have left there is removed first. A desk in use is told
    by a lock, which goes with its process; those of other machines are left alone.

    Raises:
        UserError: if it cannot be made.
    """
    with writing(folder):
        desk, descriptor = _new_desk(folder)
    try:
        yield desk
    finally:
        os.close(descriptor)
        shutil.rmtree(desk, ignore_errors=True)


def elsewhere_in(folder: Path) -> list[str]:
    """Names of the desks in ``folder`` of other machines: in use, or left by killed processes."""
    here = _prefix()
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(here))


def try_lock(descriptor: int, kind: int) -> bool | None:
    """Lock a folder without waiting: whether it worked, None where this disk has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _prefix() -> str:
    """What the names of this machine's desks begin with."""
    return f"{socket.gethostname()}-"


def _new_desk(folder: Path) -> tuple[Path, int]:
    """A new desk and the descriptor that holds its lock, once the deserted ones are removed."""
    name = f"{_prefix()}{os.getpid()}-{secrets.token_hex(4)}"
    for _ in range(_ATTEMPTS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _opened(folder) as whole:
                return folder / name, _made_and_locked(name, whole, _prefix())
        except (FileNotFoundError, FileExistsError) as error:
            # Somebody who left has found the folder empty, and removed it.
            problem = error
    raise problem


def _made_and_locked(name: str, folder: int, host: str) -> int:
    """Make the desk ``name`` in the open ``folder``; return a descriptor that holds its lock.

    The folder is named by its descriptor: another one may be in its place meanwhile.
    """
    with contextlib.suppress(OSError):  # a disk without locks
        # Nobody may look for locks while a desk is there that has none yet.
        fcntl.flock(folder, fcntl.LOCK_EX)
    for left in os.listdir(folder):
        if left.startswith(host):
            _remove_if_deserted(left, folder)
    os.mkdir(name, dir_fd=folder)
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try_lock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _remove_if_deserted(name: str, folder: int) -> None:
    # Where it is gone meanwhile, its owner was faster.
    with contextlib.suppress(FileNotFoundError), _opened(name, folder) as desk:
        if try_lock(desk, fcntl.LOCK_EX):
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


@contextlib.contextmanager
def _opened(folder: Path | str, inside: int | None = None) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
