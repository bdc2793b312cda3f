"""Helpers that inject faults into steps of training runs, and read the files of these runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
from megatron_chameleon.checkpoint.open_model import CheckpointModel
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training.checkpointing import find_progress, resumed_schedule, roll_back
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.records import Progress
from megatron_chameleon.training.run_folder import LOCK_NAME, locked_run_folder
from megatron_chameleon.training.trainer import Trainer

OVERLAPPED = TrainingParallelOptions(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
)


def progress_of_run(options: PretrainOptions) -> Progress:
    """Roll a run back to the checkpoint from which a command with these options resumes."""
    plan = plan_training(options)
    with (
        distributed(TrainingParallelOptions(), seed=0) as layout,
        locked_run_folder(options.run_dir),
    ):
        progress = find_progress(plan, layout)
        resumed_schedule(plan, progress.checkpoint)
        roll_back(progress, options.run_dir)
        return progress


def metrics(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Map each step to its line of metrics.jsonl."""
    return {record["step"]: record for record in read_metrics(run_dir / METRICS_NAME)}


def losses(run_dir: Path) -> dict[int, tuple[Any, ...]]:
    """Map each logged step to its loss, its losses per domain and its gradient norm."""
    keys = ("loss", "domain_loss", "grad_norm")
    return {step: tuple(map(line.get, keys)) for step, line in metrics(run_dir).items()}


def record_at(run_dir: Path, step: int) -> CheckpointRecord:
    """Return the record of a checkpoint after verifying the hashes of its files."""
    record = CheckpointRecord.load(step_folder(run_dir, step))
    record.verify()
    return record


def weights_at(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Map the name of each model weight in a checkpoint to its tensor."""
    with distributed(TrainingParallelOptions(), seed=0) as layout:
        reader = CheckpointModel(CheckpointRecord.load(step_folder(run_dir, step))).reader(layout)
        return {name: p.detach().clone() for name, p in reader.model.named_parameters()}


def contents(folder: Path) -> dict[Path, bytes]:
    """Map the relative path of every file except the lock to the file's bytes."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != LOCK_NAME]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def run_out(*_arguments, **_more):
    """Raise the error of a device without free memory."""
    raise torch.OutOfMemoryError("CUDA out of memory")


def before_steps(patched, actions):
    """Call ``actions[n](model)`` before the n-th step of the next run, counted from 1."""
    steps, original = itertools.count(1), Trainer.run_step

    def run_step(trainer):
        actions.get(next(steps), lambda _model: None)(trainer.model.chunks)
        original(trainer)

    patched.setattr(Trainer, "run_step", run_step)


def poison(factor):
    """Return an action of ``before_steps`` that multiplies one gradient by ``factor``.

    The action applies to the next gradient of the model's first parameter.
    """

    def register(model):
        def multiply(gradient):
            handle.remove()
            return gradient * factor

        handle = next(model[0].parameters()).register_hook(multiply)

    return register
