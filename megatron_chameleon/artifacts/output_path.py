"""Whether a result can be written where a person asked for it, before the work for it is done."""

from __future__ import annotations

import json
import os
from pathlib import Path

from megatron_chameleon.errors import UserError


def check_output(output: Path, kind: str) -> None:
    """Refuse a file of a record that could not be written later, or would replace something else.

    Nothing is written.

    Args:
        output: the file that is to hold the record.
        kind: of the record; one of the same kind may be there.

    Raises:
        UserError: if it is a folder, an artifact of another kind, or lies where the system lets
            this process write nothing.
    """
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; give the name of a file")
    there = _kind_of(output)
    if there not in (None, kind):
        raise UserError(f"--output {output} is a {there} file; give another name")
    check_folder(output.parent, f"--output {output}")


def check_folder(folder: Path, given: str) -> None:
    """Refuse a folder that could not be made or written to later. Nothing is written.

    Raises:
        UserError: beginning with ``given``, the flag and its value.
    """
    absolute = folder.absolute()
    nearest = next(place for place in (absolute, *absolute.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{given}: {nearest} cannot be written to; choose another folder")


def _kind_of(path: Path) -> str | None:
    """The kind of artifact that a file says it is; None if it is not there or says nothing."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kind = body.get("kind") if isinstance(body, dict) else None
    return str(kind) if kind is not None else None
