"""A report's files on disk: all of them are made before the first is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from megatron_chameleon.artifacts.files import replacing, write_json

# Which files the report consists of, so that the next one removes those that it does not replace.
LIST_NAME = "report_files.json"


def write_report(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` (path below ``folder`` -> content), and remove those of an earlier report.

    Args:
        folder: made where it is not there; other files in it are left alone.
        files: at least one.

    Raises:
        UserError: if a file cannot be written; those written before it stay.
    """
    earlier = _listed(folder)
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
    """The files of an earlier report; none where its list cannot be read."""
    try:
        names = json.loads((folder / LIST_NAME).read_text(encoding="utf-8"))["files"]
        return {name for name in names if _is_inside(PurePosixPath(name))}
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def _is_inside(path: PurePosixPath) -> bool:
    return len(path.parts) in (1, 2) and not path.is_absolute() and ".." not in path.parts
