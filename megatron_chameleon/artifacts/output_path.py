"""Check where a tool is asked to write before its work begins.

A tool replaces what an earlier run of it has written, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from megatron_chameleon.artifacts.record import require_kind
from megatron_chameleon.errors import UserError


def check_output(output: Path, kind: str) -> None:
    """Check that a record of ``kind`` can be written to the file ``--output``. Nothing is written.

    Raises:
        UserError: if something other than such a record is there, or the folder is not writable.
    """
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; give the name of a file")
    require_kind(output, kind)
    check_folder(output.parent, f"--output {output}")


def require_new(paths: Iterable[Path], hint: str) -> None:
    """Check that none of the files ``paths``, which carry no kind, is there.

    Raises:
        UserError: naming the first that is, ending with ``hint``.
    """
    for path in paths:
        if os.path.lexists(path):
            raise UserError(f"{path} exists; {hint}")


def check_folder(folder: Path, given: str) -> None:
    """Refuse a folder that could not be made or written to later. Nothing is written.

    Raises:
        UserError: beginning with ``given``, the flag and its value.
    """
    absolute = folder.absolute()
    nearest = next(place for place in (absolute, *absolute.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{given}: {nearest} cannot be written to; choose another folder")
