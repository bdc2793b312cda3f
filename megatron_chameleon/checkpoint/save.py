"""Writing a checkpoint: under a temporary name, hashed, then renamed."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from megatron.core import dist_checkpointing

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, hash_files
from megatron_chameleon.checkpoint.state import State
from megatron_chameleon.parallel.layout import Layout, barrier


def save_checkpoint(state: State, record: CheckpointRecord, layout: Layout) -> None:
    """Write ``state`` and ``record`` to ``record.root``. Every rank calls this.

    The folder has its name only once it is complete; a copy left by a killed run is removed.
    """
    folder = record.root
    temporary = folder.with_name(f".{folder.name}.tmp")
    if layout.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    barrier()
    dist_checkpointing.save(state, str(temporary))
    barrier()
    if layout.is_main:
        _complete(temporary, record)
    barrier()


def _complete(temporary: Path, record: CheckpointRecord) -> None:
    dataclasses.replace(record, root=temporary, files=hash_files(temporary)).save()
    if record.root.exists():  # the same step, from before the run was continued
        shutil.rmtree(record.root)
    os.replace(temporary, record.root)
