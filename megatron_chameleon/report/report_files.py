"""A report's files on disk: all of them are made before the first is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from megatron_chameleon.artifacts.files import read_json, replacing, write_json
from megatron_chameleon.artifacts.output_path import require_new
from megatron_chameleon.errors import UserError

# Which files the report consists of, so that the next one removes those that it does not replace.
LIST_NAME = "report_files.json"


def write_report(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` (path below ``folder`` -> content), and remove those of an earlier report.

    Args:
        folder: made where it is not there; other files in it are left alone.
        files: at least one.

    Raises:
        UserError: if a file cannot be written, those written before it stay; or if there is one of
            other origin than an earlier report in its place.
    """
    earlier = _listed(folder)
    new = [folder / name for name in files if name not in earlier]
    require_new(new, "choose another --output, or move it away")
    # Whatever happens on the way, the next report knows of all that lies there.
    write_json(folder / LIST_NAME, {"files": sorted({*earlier, *files})})
    for name, content in files.items():
        with replacing(folder / name) as temporary:
            temporary.write_bytes(content)
    for name in earlier - set(files):
        (folder / name).unlink(missing_ok=True)
    write_json(folder / LIST_NAME, {"files": sorted(files)})


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _listed(folder: Path) -> set[str]:
    """The files of an earlier report; none where there is no list of them.

    Raises:
        UserError: if the list is damaged or of other origin.
    """
    path = folder / LIST_NAME
    if not os.path.lexists(path):
        return set()
    hint = "choose another --output, or remove the folder"
    body = read_json(path, hint)
    names = body.get("files")
    if set(body) != {"files"} or not isinstance(names, list):
        raise UserError(f"{path} is not a list of a report's files; {hint}")
    return {name for name in names if isinstance(name, str) and _is_inside(PurePosixPath(name))}


def _is_inside(path: PurePosixPath) -> bool:
    return len(path.parts) in (1, 2) and not path.is_absolute() and ".." not in path.parts
