"""Hashes of every tensor and number in a run's checkpoints, whole and whatever the layout."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import load_common_state_dict, load_plain_tensors

from megatron_chameleon.artifacts.checkpoint import checkpoint_folders
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.parallel.layout import distributed
from tests.distributed.layout_cases import Places


def write_checkpoint_checksums(places: Places) -> None:
    """Write run -> step folder -> name -> hash."""
    runs = sorted(path for path in places.run("").iterdir() if path.is_dir())
    with distributed(ParallelOptions(), seed=0):
        sums = {
            run.name: {folder.name: checksums(folder) for folder in checkpoint_folders(run)}
            for run in runs
        }
    places.checksums.write_text(json.dumps(sums))


def checksums(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 for all that one checkpoint holds."""
    found: dict[str, str] = {}
    _add(found, "", load_plain_tensors(str(folder)))
    _add(found, "common", load_common_state_dict(str(folder)))
    return found


def _add(found: dict[str, str], name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _add(found, f"{name}/{key}", item)
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _add(found, f"{name}/{position}", item)
    elif isinstance(value, torch.Tensor):
        found[name] = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
    else:
        found[name] = hashlib.sha256(repr(value).encode()).hexdigest()
