"""Index arrays on disk: keyed by content, written atomically, checked when read."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_chameleon.artifacts.files import cannot_write, sha256_of_files, sha256_of_json
from megatron_chameleon.corpus.indexed import map_file
from megatron_chameleon.errors import UserError

_DESCRIPTION = "index.json"
# Temporary folders: of an entry that is being written, or of a damaged one.
_TEMPORARY = re.compile(r"\.([0-9a-f]{16}|damaged)\.")
# No write takes this long: older temporary folders are leftovers of killed processes.
STALE_AFTER_SECONDS = 24 * 3600
Arrays = dict[str, NDArray[Any]]


def cached_arrays(folder: Path, key: dict[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """The arrays that ``build`` returns for ``key``, from ``folder`` if it has them.

    A damaged entry is rebuilt and replaced, with a warning. Processes may share the folder: each
    entry is written by one rename, and the arrays are mapped from disk, so that ranks of a machine
    share one copy. Leftovers of killed processes are removed when they are a day old.

    Args:
        folder: of the cache.
        key: everything that determines the arrays, JSON values.
        build: makes the arrays, by name.

    Raises:
        UserError: if the folder cannot be read or written.
    """
    entry = folder / sha256_of_json(key)
    if _is_there(entry):
        try:
            return _read(entry, key)
        except (OSError, ValueError, LookupError, TypeError) as problem:
            warnings.warn(f"{entry} is damaged ({problem}) and is rebuilt", stacklevel=2)
            try:
                _discard(entry)
            except OSError as error:
                raise cannot_write(entry, error) from error
    arrays = build()
    try:
        _clear_stale(folder)
        _write(entry, key, arrays)
        # Mapped, as for every later reader, so that those in memory can be freed.
        return {name: _mapped(entry / f"{name}.npy") for name in arrays}
    except OSError as error:
        raise cannot_write(entry, error) from error


def _is_there(entry: Path) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        raise UserError(
            f"--data-cache-path {entry.parent} cannot be read: {error.strerror}; use a readable "
            "folder, or leave it out"
        ) from error


def _clear_stale(folder: Path) -> None:
    """Remove temporary folders that have not been written to for a day."""
    oldest = time.time() - STALE_AFTER_SECONDS
    for temporary in folder.glob(".*") if folder.is_dir() else ():
        if _TEMPORARY.match(temporary.name) and _last_change(temporary) < oldest:
            shutil.rmtree(temporary, ignore_errors=True)


def _last_change(folder: Path) -> float:
    """Time of the last change in a folder, in seconds; inf if another process removes it."""
    try:
        return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    except FileNotFoundError:
        return math.inf


def _read(entry: Path, key: dict[str, Any]) -> Arrays:
    description = orjson.loads((entry / _DESCRIPTION).read_bytes())
    if description["key"] != key:
        raise ValueError("it has another key")
    for name, sha256 in description["sha256"].items():
        if sha256_of_files(entry / name) != sha256:
            raise ValueError(f"the hash of {name} differs")
    return {Path(name).stem: _mapped(entry / name) for name in description["sha256"]}


def _mapped(path: Path) -> NDArray[Any]:
    """An array mapped from a .npy file, without keeping the file open."""
    with path.open("rb") as stream:
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        start = stream.tell()
    return map_file(path)[start:].view(dtype).reshape(shape)


def _write(entry: Path, key: dict[str, Any], arrays: Arrays) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{entry.name[:16]}.", dir=entry.parent))
    try:
        hashes = {}
        for name, array in arrays.items():
            file = temporary / f"{name}.npy"
            np.save(file, array, allow_pickle=False)
            hashes[file.name] = sha256_of_files(file)
        (temporary / _DESCRIPTION).write_bytes(orjson.dumps({"key": key, "sha256": hashes}))
        temporary.chmod(0o755)
        _put_in_place(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(temporary: Path, entry: Path) -> None:
    """Rename a folder; if another process was first with the same entry, keep that one."""
    try:
        os.rename(temporary, entry)
    except OSError:
        if not entry.is_dir():
            raise


def _discard(entry: Path) -> None:
    """Remove a damaged entry atomically; another process may do the same concurrently."""
    with (
        tempfile.TemporaryDirectory(prefix=".damaged.", dir=entry.parent) as folder,
        contextlib.suppress(FileNotFoundError),
    ):
        os.rename(entry, Path(folder) / entry.name)
