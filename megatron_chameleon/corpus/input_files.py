"""Input files: the files behind a path, a folder or a glob, and opening them here or on the hub."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

from megatron_chameleon.errors import UserError

FileKind = Literal["lines", "parquet"]

INSTALL_DATA = "pip install 'megatron-chameleon[data]'"
COMPRESSED_SUFFIXES = (".gz", ".zst")
# In folders; files that are named are read with the other suffixes too.
FOLDER_SUFFIXES: dict[str, FileKind] = {".jsonl": "lines", ".parquet": "parquet"}
FILE_SUFFIXES: dict[str, FileKind] = {**FOLDER_SUFFIXES, ".json": "lines", ".ndjson": "lines"}
_HELD_OUT_WORDS = {"validation", "valid", "val", "test"}
_FORMATS = "use JSON lines as .jsonl, .jsonl.gz or .jsonl.zst, or .parquet"


def kind_of_file(path: str, suffixes: dict[str, FileKind] = FILE_SUFFIXES) -> FileKind | None:
    """The format of the file at ``path`` by its suffix; None if it is unsupported."""
    name = PurePosixPath(path)
    if name.suffix not in COMPRESSED_SUFFIXES:
        return suffixes.get(name.suffix)
    return "lines" if suffixes.get(PurePosixPath(name.stem).suffix) == "lines" else None


def is_compressed(path: str) -> bool:
    """Whether ``path`` is decompressed while it is read, so that it can only be read whole."""
    return PurePosixPath(path).suffix in COMPRESSED_SUFFIXES


def find_files(pattern: str, flag: str) -> list[Path]:
    """The files at ``pattern``: a file, those of a folder at any depth, or the matches of a glob.

    Hidden files are skipped, and links to folders are followed once.

    Raises:
        UserError: if there is none, or one of another format is named; ``flag`` named it.
    """
    path = Path(pattern).expanduser()
    # A name that exists is never a pattern, whatever brackets it has.
    exists = os.path.lexists(path)
    matches = [path] if exists else [Path(m) for m in sorted(glob.glob(str(path), recursive=True))]
    if not matches:
        raise UserError(f"{flag} {pattern}: no such file or folder, and no match; check the path")
    files: list[Path] = []
    for match in matches:
        if match.is_dir():
            inside = sorted(_walk(match))
            inside = [file for file in inside if kind_of_file(str(file), FOLDER_SUFFIXES)]
            _warn_of_splits(match, inside, flag)
            files += inside
        elif kind_of_file(str(match)) is None:
            raise UserError(f"{flag} {match}: unsupported format; {_FORMATS}")
        else:
            files.append(match)
    for file in files:
        try:
            str(file).encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"{flag} {str(file)!a}: file name is not UTF-8; rename it") from error
    if not files:
        raise UserError(f"{flag} {pattern}: no file of a supported format; {_FORMATS}")
    return files


def _warn_of_splits(folder: Path, files: list[Path], flag: str) -> None:
    """Warn if a folder holds files for training and for testing, which are treated alike."""
    names = [str(file.relative_to(folder)).lower() for file in files]
    words = {word for name in names for word in re.findall("[a-z]+", name)}
    held_out = sorted(words & _HELD_OUT_WORDS)
    if "train" in words and held_out:
        warnings.warn(
            f"{flag} {folder}: files are named after the splits train and {', '.join(held_out)}, "
            "which are treated alike; pass the others by --valid-input and --test-input, or all as "
            f"hf:{folder}",
            stacklevel=5,
        )


def _walk(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:  # skipping the folder would lose text silently
        raise UserError(
            f"cannot read the folder {error.filename}: {error.strerror or error}; correct its "
            "permissions or --input"
        ) from error

    seen: set[str] = set()
    for root, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        if os.path.realpath(root) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(root))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in files if not name.startswith("."))


def is_remote(path: str) -> bool:
    """Whether ``path`` is the address of a file on the hub."""
    return "://" in path


def open_source(path: str, cache_type: str = "readahead") -> BinaryIO:
    """Open a seekable stream of bytes; call it inside :func:`reading`.

    ``cache_type`` is fsspec's, for a file on the hub: sequential reading, or "none".
    """
    if not is_remote(path):
        return open(path, "rb", buffering=0)
    import fsspec

    stream: BinaryIO = fsspec.open(path, "rb", cache_type=cache_type).open()
    return stream


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn the errors of reading a file, here or on the hub, into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or one_line(error)}; correct --input"
        ) from error
    except Exception as error:
        if isinstance(error, UserError) or not is_remote(path):
            raise
        # The libraries let through what their own HTTP client raises.
        raise UserError(f"cannot read {path}: {one_line(error)}; try again later") from error


def one_line(error: BaseException) -> str:
    """The message of ``error`` on one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def size_and_time(path: str) -> tuple[int, int]:
    """Bytes of a file, and its modification time in ns since 1970; 0 where unknown.

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
