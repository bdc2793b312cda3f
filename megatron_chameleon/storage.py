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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from megatron_chameleon.errors import UserError, one_line

S = TypeVar("S")
T = TypeVar("T")

INSTALL_STORAGE = "pip install 'megatron-chameleon[storage]'"
# Bytes per request of a sequential read. s3fs would hold 50 MiB of every open file.
_READ_AHEAD_BYTES = 1 << 23
_CONCURRENT_RANGES = 128
# On network storage, opening a file takes milliseconds, and in object storage tens of milliseconds.
_CONCURRENT_FILES = 32
# Names of the modification time and of the hash or version of the content in fsspec's infos.
_TIME_NAMES = ("LastModified", "last_modified", "mtime", "updated")
_VERSION_NAMES = ("ETag", "etag", "blob_id")


@dataclasses.dataclass(frozen=True)
class FileState:
    """Size, modification time and version of a file.

    Attributes:
        bytes: size; 0 if unknown.
        modified_ns: modification time in nanoseconds since 1970, of a remote file in whole seconds;
            0 if unknown.
        etag: hash or version of the content; '' if unknown, as for local files.
    """

    bytes: int
    modified_ns: int
    etag: str = ""


# A path of this machine, or a URL, which a Path would change.
Location = Path | str


def is_remote(path: Location) -> bool:
    """Whether ``path`` is a URL, which is read through fsspec."""
    return isinstance(path, str) and "://" in path


def location(text: str) -> Location:
    """Return a URL unchanged, and any other text as a path."""
    return text if is_remote(text) else Path(text)


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


def absolute(path: str) -> str:
    """Return a path as an absolute path, and a URL unchanged."""
    return path if is_remote(path) else os.path.abspath(path)


@contextlib.contextmanager
def reading(path: Location, hint: str = "correct --input") -> Iterator[None]:
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


def open_file(path: str, cache_type: str = "readahead", size: int | None = None) -> BinaryIO:
    """Open a seekable stream of bytes; call it inside :func:`reading`.

    Args:
        path: path or URL.
        cache_type: fsspec's cache of a remote file; the default suits sequential reads.
        size: number of bytes that are needed; None if unknown. At most as many are read ahead.
    """
    if not is_remote(path):
        return open(path, "rb", buffering=0)
    system, name = file_system(path)
    block_size = _READ_AHEAD_BYTES if size is None else min(size, _READ_AHEAD_BYTES)
    stream: BinaryIO = system.open(name, "rb", block_size=block_size, cache_type=cache_type)
    return stream


def read_ranges(path: Location, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the bytes from start to stop of each range; call it inside :func:`reading`.

    Of a remote file, 128 ranges are requested concurrently if its file system supports that.

    Raises:
        OSError: if a range cannot be read completely.
    """
    for first in range(0, len(ranges), _CONCURRENT_RANGES):
        batch = ranges[first : first + _CONCURRENT_RANGES]
        if is_remote(path):
            system, name = file_system(str(path))
            # Lists: fsspec takes a tuple for one number, unless the file system is asynchronous.
            starts, stops = map(list, zip(*batch, strict=True))
            contents = system.cat_ranges([name] * len(batch), starts, stops, on_error="raise")
        else:
            with open(path, "rb", buffering=0) as stream:
                contents = [os.pread(stream.fileno(), stop - at, at) for at, stop in batch]
        for (start, stop), content in zip(batch, contents, strict=True):
            if len(content) != stop - start:
                raise OSError(errno.EIO, f"it ends before byte {stop}", str(path))
            yield content


def concurrently(read: Callable[[S], T], files: Sequence[S]) -> list[T]:
    """Call ``read`` for each of ``files``, in up to 32 threads; return the results in order.

    After an error, which is raised, no other file is begun.
    """
    with ThreadPoolExecutor(_CONCURRENT_FILES) as pool:
        return list(pool.map(read, files))


def file_state(path: Location, *, refresh: bool = False) -> FileState:
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
    system, name = file_system(str(path))
    if refresh:
        system.invalidate_cache(name)
    info = system.info(name)
    if info["type"] != "file":
        raise OSError(errno.EINVAL, "not a file", path)
    etag = next((str(info[key]) for key in _VERSION_NAMES if info.get(key)), "")
    modified = next((info[key] for key in _TIME_NAMES if info.get(key)), 0)
    return FileState(int(info.get("size") or 0), _nanoseconds(modified), etag)


def find_remote(pattern: str) -> list[tuple[str, list[str] | None]]:
    """List the matches of ``pattern``, a URL or a glob; call it inside :func:`reading`.

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
    # Some servers list milliseconds, but answer a request for one file in whole seconds.
    return int(modified) * 10**9
