"""Opening what a source's path leads to: a file on this machine, or one on the hub."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from megatron_chameleon.errors import UserError

INSTALL_DATA = "pip install 'megatron-chameleon[data]'"


def is_remote(path: str) -> bool:
    """Whether ``path`` is the address of a file on the hub."""
    return "://" in path


def open_source(path: str, cache_type: str = "readahead") -> BinaryIO:
    """A stream of bytes that can be read and sought; call it inside :func:`reading`.

    ``cache_type`` is fsspec's, of a file on the hub: reading on in order, or "none".
    """
    if not is_remote(path):
        return open(path, "rb", buffering=0)
    import fsspec

    stream: BinaryIO = fsspec.open(path, "rb", cache_type=cache_type).open()
    return stream


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what goes wrong with a file or with the way to it into one line for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or one_line(error)}; correct --input"
        ) from error
    except Exception as error:
        if isinstance(error, UserError) or not is_remote(path):
            raise
        # The libraries below let through what their own HTTP client raises.
        raise UserError(f"cannot read {path}: {one_line(error)}; try again later") from error


def one_line(error: BaseException) -> str:
    """What ``error`` says, on one line, with its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def size_and_time(path: str) -> tuple[int, int]:
    """Bytes of a file, and when it was last changed in ns since 1970; 0 where nobody says.

    Raises:
        UserError: if it is missing, unreadable or not a regular file.
    """
    with reading(path):
        if not is_remote(path):
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
                raise OSError(errno.EINVAL, "not a regular file", path)
            return status.st_size, status.st_mtime_ns
        import fsspec

        system, name = fsspec.url_to_fs(path)
        return int(system.info(name).get("size") or 0), 0
