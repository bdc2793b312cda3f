"""Read strict JSON, write and replace files atomically, and compute hashes."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import math
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.errors import UserError

# Twice the size of the largest artifacts, which are an evaluation of 32,767 domains in 256 clusters
# each, and a swarm of 512 members over 32,767 domains.
MAX_JSON_BYTES = 1 << 30
_CHUNK = 1 << 20
# If there are more files than this, one call to sync flushes all of them.
_MAX_FSYNC = 1000
_REPLACED_SUFFIX = ".replaced"
# Errors for a full disk, an exhausted quota, and a file that exceeds the size limit.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to ``path``; rename it to ``path`` when the block succeeds.

    If the block raises, the temporary file is removed and ``path`` is unchanged.

    Raises:
        UserError: if the folder cannot be created or written, or the disk is full.
    """
    # The name is truncated, since the whole name with a suffix could be too long for a file name.
    temporary = path.parent / f".{path.name[:40]}.{uuid.uuid4().hex[:12]}.tmp"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
    try:
        yield temporary
        with writing(path):
            flush_to_disk(temporary)
            os.replace(temporary, path)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise cannot_write(path, error) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes ``path``, into a UserError."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def link_or_copy(path: Path, target: Path) -> None:
    """Hard-link the immutable file ``path`` as ``target``, or copy it.

    Raises:
        UserError: if it cannot be written.
    """
    with writing(target):
        try:
            # Link the file itself, since a symbolic link to it could break later.
            os.link(path.resolve(), target)
        except OSError:
            # The file is on another file system, or the file system has no hard links.
            shutil.copyfile(path, target)


def cannot_write(path: Path, error: Exception) -> UserError:
    """Return the UserError for a failed write to ``path``."""
    reason = " ".join(str(getattr(error, "strerror", None) or error).split())
    return UserError(f"cannot write {path}: {reason}; free space or choose another folder")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented UTF-8 JSON, atomically.

    Raises:
        UserError: if it cannot be written.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """Read the JSON object in the file ``path``.

    Args:
        path: a regular file of UTF-8, at most ``MAX_JSON_BYTES`` long.
        hint: how to create a valid file; ends every message.

    Raises:
        UserError: naming the file, if it cannot be read, is not an object, repeats a key or is
            nested too deeply, or if a number in it is not finite or has too many digits.
    """
    return _parsed(path, hint, lambda text: json.loads(text, **_STRICT))


def read_foreign_json(path: Path, hint: str) -> dict[str, Any]:
    """Read the JSON object in a file of another library, as Python's json module reads it.

    Keys may be repeated, of which the last one counts, and numbers may be NaN or infinite.

    Raises:
        UserError: as :func:`read_json`, but for these.
    """
    return _parsed(path, hint, lambda text: json.loads(text, parse_int=_integer))


def _parsed(path: Path, hint: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    text = read_text(path, hint)
    try:
        body = parse(text)
        if "\\ud" in text.lower():  # half of a pair of surrogates could not be written again
            json.dumps(body, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: not JSON ({error.msg}); repair it; {hint}"
        ) from error
    except (ValueError, RecursionError) as error:  # ValueError: a repeated key, among others
        raise UserError(f"cannot read {path}: {error}; {hint}") from error
    if not isinstance(body, dict):
        raise UserError(f"{path}: expected a JSON object, not a {type(body).__name__}; {hint}")
    return body


def read_text(path: Path, hint: str, most_bytes: int = MAX_JSON_BYTES) -> str:
    """Read the regular file ``path`` as UTF-8, without a byte order mark.

    Raises:
        UserError: naming the file and ending with ``hint``, if it cannot be read or has more than
            ``most_bytes``.
    """
    try:
        require_regular_file(path)
        if (size := path.stat().st_size) > most_bytes:
            raise OSError(errno.EFBIG, f"{size} bytes, more than {most_bytes}")
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; {hint}") from None
    except (OSError, ValueError) as error:  # ValueError: the text is not UTF-8
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}; {hint}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is repeated")
    return body


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not finite")
    return number


def _integer(text: str) -> int:
    if len(text) > sys.float_info.max_10_exp:  # float() of the integer could raise OverflowError
        raise ValueError(f"{text[:20]}... has too many digits")
    return int(text)


_STRICT: dict[str, Any] = {
    "object_pairs_hook": _object,
    "parse_float": _finite,
    "parse_int": _integer,
    "parse_constant": _finite,
}


def require_regular_file(path: Path) -> None:
    """Reject pipes, sockets and devices, since reading them may never end.

    Raises:
        OSError: if ``path`` is one of these, a folder, or missing.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def sha256_of_files(*paths: Path, on_bytes: Callable[[int], object] | None = None) -> str:
    """Hex SHA-256 of the concatenated files; ``on_bytes`` gets the number of bytes just read."""
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
    """Rename the folder ``new`` to ``folder``, and delete the previous ``folder``.

    Folders cannot be swapped atomically: the old one is renamed first. It is restored if the second
    step fails, and by :func:`finish_replacements` if the process is killed between the two.

    Raises:
        OSError: from the file system; ``folder`` is then unchanged.
    """
    before = folder.with_name(f".{folder.name}{_REPLACED_SUFFIX}")
    try:
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
            os.replace(folder, before)
        os.replace(new, folder)
    finally:
        finish_replacements(folder.parent, glob.escape(folder.name))


def finish_replacements(parent: Path, name: str = "*") -> None:
    """Undo or complete interrupted calls of :func:`replace_folder`; call it before using folders.

    A missing folder is restored. If the folder exists, its old version is deleted.

    Args:
        parent: folder that contains the folders.
        name: glob pattern of their names.

    Raises:
        OSError: from the file system.
    """
    for before in list(parent.glob(f".{name}{_REPLACED_SUFFIX}")):
        folder = before.with_name(before.name[1:].removesuffix(_REPLACED_SUFFIX))
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):  # another process has restored it
                os.replace(before, folder)


def require_new(paths: Iterable[Path], hint: str) -> None:
    """Check that none of ``paths`` exists. For records use :func:`record.check_output`.

    Raises:
        UserError: naming the first path that exists, ending with ``hint``.
    """
    for path in paths:
        if os.path.lexists(path):
            raise UserError(f"{path} exists; {hint}")


def require_writable(folder: Path, option: str) -> None:
    """Check that ``folder`` can be created or written to. Nothing is written.

    Raises:
        UserError: if it cannot; the message begins with ``option``, the flag and its value.
    """
    absolute = folder.absolute()
    nearest = next(place for place in (absolute, *absolute.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{option}: {nearest} cannot be written to; choose another folder")


def flush_all_to_disk(paths: Sequence[Path]) -> None:
    """Call :func:`flush_to_disk` on each path, or sync once for more than a thousand paths."""
    if len(paths) > _MAX_FSYNC:
        os.sync()
    else:
        for path in paths:
            flush_to_disk(path)


def flush_to_disk(path: Path) -> None:
    """Flush ``path`` to disk, so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
