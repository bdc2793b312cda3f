"""Read JSON strictly; write and hash files so that no half-written one has its final name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.errors import UserError

# The largest artifacts are an evaluation of 32,767 domains in 256 clusters and a swarm of 512
# members over as many domains: about half of this.
MAX_JSON_BYTES = 1 << 30
MAX_JSON_DEPTH = 64
_CHUNK = 1 << 20
# Of more files than these, everything that waits to be written is flushed by one call.
_MOST_FLUSHED_ALONE = 1000
_SET_ASIDE_SUFFIX = ".replaced"
# What a write says when the disk is full, the quota is used up or the file may not grow.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; rename it to ``path`` when the block ends well.

    If the block raises, the temporary file is removed and ``path`` is as it was.

    Raises:
        UserError: if the folder cannot be made or written, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not the whole name: with what is added it could be longer than a file name may be.
        prefix = f".{path.name[:40]}."
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _put_in_place(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in NO_ROOM:
            raise cannot_write(path, error) from error
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block that writes ``path``; what the system refuses in it is told in one line.

    Raises:
        UserError: if the file cannot be written, or the disk is full.
    """
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def link_or_copy(path: Path, target: Path) -> None:
    """Give the file ``path``, which nobody changes any more, a second name.

    Raises:
        UserError: if the disk does not take it.
    """
    with writing(target):
        try:
            os.link(path.resolve(), target)  # of the file itself, if the path is a symbolic link
        except OSError:  # another disk, or one without hard links
            shutil.copyfile(path, target)


def cannot_write(path: Path, error: OSError) -> UserError:
    """What to say when the system refuses to write ``path``."""
    return UserError(
        f"cannot write {path}: {error.strerror or error}; free space or choose another folder"
    )


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented UTF-8 JSON, atomically.

    Raises:
        UserError: if it cannot be written, or :func:`read_json` would not read it again.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    content = text.encode()
    if len(content) > MAX_JSON_BYTES:
        raise UserError(
            f"cannot write {path}: {len(content)} bytes, more than {MAX_JSON_BYTES}; use fewer "
            "domains, clusters or members"
        )
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """Read the JSON object in the file ``path``.

    Args:
        path: a regular file of UTF-8, at most ``MAX_JSON_BYTES`` long.
        hint: how to get a good one; ends every message.

    Raises:
        UserError: naming the file, and the line or field, if it cannot be read, is not an object,
            repeats a key, is nested deeper than ``MAX_JSON_DEPTH`` or has a number that is not
            finite or has too many digits.
    """
    try:
        require_regular_file(path)
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise UserError(f"cannot read {path}: {size} bytes, more than {MAX_JSON_BYTES}; {hint}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; {hint}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path at all
        raise UserError(f"cannot read {path}: {error}; {hint}") from error
    try:
        body = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: not JSON ({error.msg}); repair it; {hint}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); repair it; {hint}") from error
    if not isinstance(body, dict):
        raise UserError(f"{path}: a JSON object is expected, not a {type(body).__name__}; {hint}")
    problem = _first_problem(body, ())
    if problem:
        raise UserError(f"{path}: {problem}; {hint}")
    return body


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is repeated")
    return body


def _first_problem(value: Any, place: tuple[str | int, ...]) -> str | None:
    """Describe the first value below ``value`` that no artifact can hold; None without any."""
    if len(place) > MAX_JSON_DEPTH:
        return f"field {place[0]}: nested deeper than {MAX_JSON_DEPTH} levels"
    if isinstance(value, float):
        where = ".".join(map(str, place))
        return None if math.isfinite(value) else f"field {where}: {value} is not finite"
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = (
        _first_problem(item, (*place, key))
        for key, item in items
        if isinstance(item, float | dict | list)
    )
    return next((problem for problem in found if problem), None)


def require_regular_file(path: Path) -> None:
    """Check that reading ``path`` comes to an end: of a pipe, a socket or a device it may not.

    Raises:
        OSError: if it is one of these, a folder, or not there.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def sha256_of_files(*paths: Path, on_bytes: Callable[[int], object] | None = None) -> str:
    """Hex SHA-256 of the concatenated contents of ``paths``; ``on_bytes`` is told what was read."""
    digest = hashlib.sha256()
    for path in paths:
        require_regular_file(path)
        with path.open("rb") as stream:
            while block := stream.read(_CHUNK):
                digest.update(block)
                if on_bytes:
                    on_bytes(len(block))
    return digest.hexdigest()


def sha256_of_json(value: Any) -> str:
    """Hex SHA-256 of ``value`` as canonical JSON (sorted keys, no white space)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def replace_folder(new: Path, folder: Path) -> None:
    """Give the folder ``new`` the name ``folder``; what has that name now is deleted.

    Two folders cannot be swapped at once. The old one has another name in between, gets its own
    back if the second step fails, and by :func:`put_back` if the process does not outlive the
    first.

    Raises:
        OSError: if the system refuses; ``folder`` is then as it was.
    """
    before = _set_aside(folder)
    try:
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
            os.replace(folder, before)
        os.replace(new, folder)
    finally:
        put_back(folder)
    shutil.rmtree(before, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Undo a replacement of ``folder`` that was cut off between its two steps, if one was.

    Whoever looks for the folder calls this first.

    Raises:
        OSError: if the system refuses.
    """
    if not folder.exists():
        with contextlib.suppress(FileNotFoundError):  # none, or another process was faster
            os.replace(_set_aside(folder), folder)


def put_all_back(parent: Path) -> None:
    """:func:`put_back`, for every folder in ``parent``."""
    for path in parent.glob(f".*{_SET_ASIDE_SUFFIX}"):
        put_back(path.with_name(path.name[1:].removesuffix(_SET_ASIDE_SUFFIX)))


def remove_replaced(folder: Path) -> None:
    """Delete what a replacement of ``folder`` was killed over deleting; call ``put_back`` first."""
    if folder.exists():
        shutil.rmtree(_set_aside(folder), ignore_errors=True)


def _set_aside(folder: Path) -> Path:
    """What an old folder is called while a new one takes its name."""
    return folder.with_name(f".{folder.name}{_SET_ASIDE_SUFFIX}")


def _put_in_place(temporary: Path, path: Path) -> None:
    try:
        os.chmod(temporary, 0o666 & ~_umask())
        flush_to_disk(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def flush_all_to_disk(paths: Sequence[Path]) -> None:
    """Like :func:`flush_to_disk` for all of ``paths``; many at once, since each takes its time."""
    if len(paths) > _MOST_FLUSHED_ALONE:
        os.sync()
    else:
        for path in paths:
            flush_to_disk(path)


def flush_to_disk(path: Path) -> None:
    """Wait until what was written to ``path`` would outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
