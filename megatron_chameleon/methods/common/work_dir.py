"""Where a method puts the runs that it makes."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_chameleon.errors import UserError

# How a person chooses another folder for what a command makes: a method's, and a sweep's.
BY_WORK_DIR, BY_OUTPUT = "give another --work-dir", "give another --output"


def work_dir_of(output: Path, work_dir: Path | None) -> Path:
    """What --work-dir gives; the mixture's path without .json unless given.

    Raises:
        UserError: if it is not given, and the output's name says none.
    """
    if work_dir is not None:
        return work_dir
    if output.suffix != ".json":
        raise UserError(f"--output {output}: give a name that ends with .json")
    return output.with_suffix("")


def check_output(output: Path) -> None:
    """Refuse a mixture's path that could not be written after all the training. Nothing is written.

    Raises:
        UserError: if it is a folder, or lies where the system lets this process write nothing.
    """
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; give the name of a file")
    nearest = next(folder for folder in output.absolute().parents if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"--output {output}: {nearest} cannot be written to; choose another folder")
