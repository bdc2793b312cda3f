"""Read local files and, through fsspec, files in object storage: s3://, gs://, hf:// and others.

Credentials and endpoints come from the environment or the configuration files of the library that
fsspec uses for the protocol; for s3:// these are s3fs and AWS's variables, such as
AWS_ENDPOINT_URL. Failed requests are repeated by that library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, BinaryIO

from megatron_chameleon.errors import UserError, one_line

INSTALL_STORAGE = "pip install 'megatron-chameleon[storage]'"
# Bytes per request of a sequential read. s3fs would hold 50 MiB of every open file.
_READ_AHEAD_BYTES = 1 << 23
# Names of the modification time and of the hash or version of the content in fsspec's infos.
_TIME_NAMES = ("LastModified", "last_modified", "mtime", "updated")
_VERSION_NAMES = ("ETag", "etag", "blob_id")


@dataclasses.dataclass(frozen=True)
class FileState:
    """What is known of a file's content without reading it.

    Attributes:
        bytes: size; 0 if unknown.
        modified_ns: modification time in nanoseconds since 1970; 0 if unknown.
        etag: hash or version of the content; '' if unknown, as for local files.
    """

    bytes: int
    modified_ns: int
    etag: str = ""


def is_remote(path: str) -> bool:
    """Whether ``path`` is a URL, which is read through fsspec."""
    return "://" in path


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for ``url``, and the file's name in this file system.

    Raises:
        UserError: if the protocol is unknown, or its package is not installed.
    """
    import fsspec

    try:
        system, name = fsspec.url_to_fs(url)
    except ImportError as error:
        raise UserError(
            f"{url}: {one_line(error).rstrip('.')}; for s3:// and gs://, {INSTALL_STORAGE}"
        ) from error
    except ValueError as error:
        raise UserError(f"{url}: {one_line(error)}; correct the address") from error
    return system, name


@contextlib.contextmanager
def reading(path: str, hint: str = "correct --input") -> Iterator[None]:
    """Convert errors of reading a local or remote file to UserError, with ``hint`` as the fix."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # The errors of a remote file may come from several libraries, whose exceptions have no
        # common base class.
        if not (isinstance(error, OSError) or is_remote(path)):
            raise
        reason = (isinstance(error, OSError) and error.strerror) or one_line(error)
        if is_remote(path):
            if isinstance(error, FileNotFoundError):
                reason = "no such file"
            hint = f"{hint}, or check the credentials and the network"
        raise UserError(f"cannot read {path}: {reason}; {hint}") from error


def open_file(path: str, cache_type: str = "readahead") -> BinaryIO:
    """Open a seekable stream of bytes; call it inside :func:`reading`.

    ``cache_type`` is fsspec's cache of a remote file; the default suits sequential reads.
    """
    if not is_remote(path):
        return open(path, "rb", buffering=0)
    system, name = file_system(path)
    stream: BinaryIO = system.open(name, "rb", block_size=_READ_AHEAD_BYTES, cache_type=cache_type)
    return stream


def file_state(path: str, *, refresh: bool = False) -> FileState:
    """Return size, modification time and version of a file; call it inside :func:`reading`.

    Args:
        path: path or URL.
        refresh: whether to request the state of a remote file even if a listing of its folder is
            cached.

    Raises:
        OSError: if the file is missing, unreadable or not a regular file.
    """
    if not is_remote(path):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            raise OSError(errno.EINVAL, "not a regular file", path)
        return FileState(status.st_size, status.st_mtime_ns)
    system, name = file_system(path)
    if refresh:
        system.invalidate_cache(name)
    info = system.info(name)
    if info["type"] != "file":
        raise OSError(errno.EINVAL, "not a file", path)
    etag = next((str(info[key]) for key in _VERSION_NAMES if info.get(key)), "")
    modified = next((info[key] for key in _TIME_NAMES if info.get(key)), 0)
    return FileState(int(info.get("size") or 0), _nanoseconds(modified), etag)


def find_remote(pattern: str) -> list[tuple[str, list[str] | None]]:
    """List what ``pattern``, a URL that may be a glob, matches; call it inside :func:`reading`.

    Returns:
        The URL of each match, sorted by path. A folder is listed with the URLs of all files below
        it, sorted by path and without hidden files; a file is listed with None.
    """
    system, name = file_system(pattern)
    try:
        matches = {name: system.info(name)}
    except FileNotFoundError:
        matches = system.glob(name, detail=True)
    found: list[tuple[str, list[str] | None]] = []
    for match, info in sorted(matches.items(), key=lambda item: item[0].split("/")):
        if info["type"] == "file":
            found.append((system.unstrip_protocol(match), None))
            continue
        files = sorted(system.find(match), key=lambda file: file.split("/"))
        shown = [file for file in files if "/." not in file.removeprefix(match)]
        found.append((system.unstrip_protocol(match), list(map(system.unstrip_protocol, shown))))
    return found


def _nanoseconds(modified: datetime | float | str) -> int:
    if isinstance(modified, str):
        modified = datetime.fromisoformat(modified)
    if isinstance(modified, datetime):
        zone = modified if modified.tzinfo else modified.replace(tzinfo=UTC)
        modified = zone.timestamp()
    return int(modified * 10**9)
