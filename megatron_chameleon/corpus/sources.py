"""From what ``--input`` was given to the list of files to read."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Sequence
from pathlib import Path

from megatron_chameleon.corpus.lines import COMPRESSED_SUFFIXES
from megatron_chameleon.errors import UserError

# A longer domain name is most likely another field's text; as a file name it would not do.
MAX_DOMAIN_BYTES = 80
FOLDER_SUFFIX = ".jsonl"
FILE_SUFFIXES = (".jsonl", ".json", ".ndjson")
_FORMATS = "JSON lines as .jsonl, .jsonl.gz or .jsonl.zst are read"


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One file to read; ``domain`` is None where each line names its own, or none is asked for."""

    path: Path
    domain: str | None


def find_sources(inputs: Sequence[str]) -> list[SourceFile]:
    """The files behind ``inputs``, in order: PATH or NAME=PATH; a file, folder or glob.

    Folders are searched at any depth, for .jsonl, .jsonl.gz and .jsonl.zst. A file that is named
    twice for the same domain is listed once.

    Raises:
        UserError: for an input that leads to no file, or to one of another format.
    """
    if not inputs:
        raise UserError("--input names nothing to read; give files, folders or globs")
    found: dict[SourceFile, None] = {}
    for given in inputs:
        domain, pattern = _split_input(given)
        found.update((SourceFile(path, domain), None) for path in _files(pattern, given))
    return list(found)


def _split_input(given: str) -> tuple[str | None, str]:
    """NAME=PATH in two; a path may hold '=' itself, after its first '/'."""
    name, equals, pattern = given.partition("=")
    if not equals or "/" in name:
        return None, given
    if not name or not pattern or len(name.encode()) > MAX_DOMAIN_BYTES:
        raise UserError(
            f"--input {given}: a domain is given as NAME=PATH, NAME of at most "
            f"{MAX_DOMAIN_BYTES} bytes"
        )
    return name, pattern


def _files(pattern: str, given: str) -> list[Path]:
    path = Path(pattern).expanduser()
    # A name that exists is never a pattern, whatever brackets it has.
    matches = [path] if path.exists() else [Path(m) for m in _glob(str(path))]
    if not matches:
        raise UserError(f"--input {given}: there is no such file or folder, and no match")
    files = [file for match in matches for file in _files_at(match)]
    if not files:
        raise UserError(f"--input {given}: no file of JSON lines there; {_FORMATS}")
    return files


def _glob(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern, recursive=True))


def _files_at(path: Path) -> list[Path]:
    if path.is_dir():
        inside = sorted(path.rglob("*"))
        return [file for file in inside if file.is_file() and _format(file) == FOLDER_SUFFIX]
    if _format(path) not in FILE_SUFFIXES:
        raise UserError(f"--input {path}: of an unknown format; {_FORMATS}")
    return [path]


def _format(path: Path) -> str:
    """The suffix below that of the compression."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix
