"""Writing a checkpoint: under a temporary name, hashed, then renamed."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, hash_files
from megatron_chameleon.artifacts.files import cannot_write, flush_to_disk
from megatron_chameleon.checkpoint.state import State
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import barrier, from_main


def save_checkpoint(state: State, record: CheckpointRecord) -> None:
    """Write ``state`` and ``record`` to ``record.root``. Every rank calls this.

    The folder has its name only once it is complete; a copy left by a killed run is removed.

    Raises:
        UserError: if the disk is full or refuses; earlier checkpoints are as they were.
    """
    temporary = record.root.with_name(f".{record.root.name}.tmp")
    from_main(lambda: _make_empty(temporary))
    try:
        dist_checkpointing.save(state, str(temporary))
    except (OSError, CheckpointException) as error:
        shutil.rmtree(temporary, ignore_errors=True)  # nobody can use it, and it takes room
        raise UserError(
            f"cannot write the checkpoint {record.root} ({_first_line(error)}); free space or "
            "choose another folder, and run again: earlier checkpoints are as they were"
        ) from error
    barrier()
    from_main(lambda: _complete(temporary, record))


def _make_empty(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _complete(temporary: Path, record: CheckpointRecord) -> None:
    dataclasses.replace(record, root=temporary, files=hash_files(temporary)).save()
    for path in temporary.iterdir():
        flush_to_disk(path)
    if record.root.exists():  # the same step, from before the run was continued
        shutil.rmtree(record.root)
    os.replace(temporary, record.root)


def _first_line(error: BaseException) -> str:
    """What went wrong on the rank where it went wrong, on one line."""
    if isinstance(error, CheckpointException):
        if not error.failures:
            return "writing failed; the lines above may say why"
        error = next(iter(error.failures.values()))[0]
    return (str(error).splitlines() or [type(error).__name__])[0]
