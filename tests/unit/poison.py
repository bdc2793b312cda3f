"""A checkpoint with NaN weights, like that of a diverged run."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint.open_model import CheckpointModel
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions


def poison_checkpoint(folder: Path, parameter: str) -> None:
    """Replace the checkpoint in ``folder`` by one of only weights, with NaN in one parameter."""
    record = CheckpointRecord.load(folder)
    with distributed(ParallelOptions(), seed=0) as layout:
        reader = CheckpointModel(record).reader(layout)
        with torch.no_grad():
            reader.model.get_parameter(parameter).fill_(float("nan"))
        save_checkpoint(model_state([reader.model]), record)
