"""The files behind a path, a folder or a pattern."""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from megatron_chameleon.corpus.reading.lines import COMPRESSED_SUFFIXES
from megatron_chameleon.errors import UserError

FileKind = Literal["lines", "parquet"]

# In folders; under their own name files of the other suffixes are read too.
FOLDER_SUFFIXES: dict[str, FileKind] = {".jsonl": "lines", ".parquet": "parquet"}
FILE_SUFFIXES: dict[str, FileKind] = {**FOLDER_SUFFIXES, ".json": "lines", ".ndjson": "lines"}
_HELD_OUT_WORDS = {"validation", "valid", "val", "test"}
_FORMATS = "JSON lines as .jsonl, .jsonl.gz or .jsonl.zst and .parquet are read"


def kind_of_file(path: str, suffixes: dict[str, FileKind] = FILE_SUFFIXES) -> FileKind | None:
    """How the file at ``path`` is read, by its suffix; None if it is not."""
    name = PurePosixPath(path)
    if name.suffix not in COMPRESSED_SUFFIXES:
        return suffixes.get(name.suffix)
    return "lines" if suffixes.get(PurePosixPath(name.stem).suffix) == "lines" else None


def files_behind(pattern: str, flag: str) -> list[Path]:
    """The files at ``pattern``: one, those of a folder at any depth, or what a glob matches.

    Raises:
        UserError: if there is none, or one of another format is named.
    """
    path = Path(pattern).expanduser()
    # A name that exists is never a pattern, whatever brackets it has.
    exists = os.path.lexists(path)
    matches = [path] if exists else [Path(m) for m in sorted(glob.glob(str(path), recursive=True))]
    if not matches:
        raise UserError(f"{flag} {pattern}: there is no such file or folder, and no match")
    files = [file for match in matches for file in _files_at(match, flag)]
    for file in files:
        _check_name(file, flag)
    if not files:
        raise UserError(f"{flag} {pattern}: no file of a known format there; {_FORMATS}")
    return files


def _files_at(path: Path, flag: str) -> list[Path]:
    if path.is_dir():
        inside = sorted(_walk(path))
        found = [file for file in inside if kind_of_file(str(file), FOLDER_SUFFIXES)]
        _warn_of_splits(path, found, flag)
        return found
    if kind_of_file(str(path)) is None:
        raise UserError(f"{flag} {path}: of an unknown format; {_FORMATS}")
    return [path]


def _check_name(path: Path, flag: str) -> None:
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{flag} {str(path)!a}: the name of this file is no UTF-8; rename it"
        ) from error


def _warn_of_splits(folder: Path, files: Iterable[Path], flag: str) -> None:
    """Say so where files for training and for testing lie together and all are taken alike."""
    words = {
        word
        for file in files
        for word in re.findall("[a-z]+", str(file.relative_to(folder)).lower())
    }
    held_out = sorted(words & _HELD_OUT_WORDS)
    if "train" in words and held_out:
        warnings.warn(
            f"{flag} {folder}: files are named after the splits train and {', '.join(held_out)}, "
            "which are taken alike; give the others by --valid-input and --test-input, or all as "
            f"hf:{folder}",
            stacklevel=6,
        )


def _walk(folder: Path) -> Iterator[Path]:
    """The files below ``folder``, hidden ones aside; links to folders are followed once."""
    seen: set[str] = set()
    for root, folders, files in os.walk(folder, followlinks=True, onerror=_unreadable):
        if os.path.realpath(root) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(root))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in files if not name.startswith("."))


def _unreadable(error: OSError) -> None:
    # A folder that is passed over in silence would be text that is missing in silence.
    raise UserError(
        f"cannot read the folder {error.filename}: {error.strerror or error}; correct its "
        "permissions or --input"
    ) from error
