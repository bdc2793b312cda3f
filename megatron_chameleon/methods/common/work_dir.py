"""Where a method puts the runs that it makes."""

from __future__ import annotations

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
