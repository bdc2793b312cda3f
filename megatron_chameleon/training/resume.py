"""Whether a run starts, goes on or is finished, from what its folder holds."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, checkpoint_folders
from megatron_chameleon.artifacts.provenance import plain_options
from megatron_chameleon.artifacts.training_run import METRICS_NAME, TrainingRun, keep_metrics_until
from megatron_chameleon.errors import UserError
from megatron_chameleon.training.plan import TrainingPlan

# These may differ when a run is continued: they change nothing of what is computed.
# Corpus and mixture are compared by their hashes, wherever they lie.
FREE_OPTIONS = (
    "corpus",
    "mixture",
    "run_dir",
    "micro_batch_size",
    "log_interval",
    "save_interval",
    "overwrite",
    "parallel",
)


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands: its last record, if any, and the checkpoint it goes on from."""

    run: TrainingRun | None = None
    checkpoint: CheckpointRecord | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return self.checkpoint.step if self.checkpoint else 0


def find_progress(plan: TrainingPlan) -> Progress:
    """Look into the run's folder and make it ready. Called on one rank.

    Raises:
        UserError: if the folder holds a run of other options, corpus or mixture, or a damaged
            checkpoint.
    """
    folder = plan.options.run_dir
    if plan.options.overwrite and TrainingRun.exists(folder):
        shutil.rmtree(folder)
    folders = checkpoint_folders(folder)
    if not TrainingRun.exists(folder):
        if folders:
            raise UserError(
                f"{folder} has checkpoints but no run.json, which says what they belong to; "
                "choose another --run-dir"
            )
        return Progress()
    run = TrainingRun.load(folder)
    _require_same(plan, run)
    checkpoint = _whole_checkpoint(folders[-1]) if folders else None
    if checkpoint:
        _require_same_optimizer(plan, checkpoint)
    progress = Progress(run, checkpoint)
    keep_metrics_until(folder / METRICS_NAME, progress.step)
    return progress


def _whole_checkpoint(folder: Path) -> CheckpointRecord:
    try:
        checkpoint = CheckpointRecord.load(folder)
        checkpoint.verify()
    except UserError as error:
        raise UserError(f"{error}: delete {folder} and run again to go on from there") from error
    return checkpoint


def _require_same(plan: TrainingPlan, run: TrainingRun) -> None:
    way_out = "choose another --run-dir, or give --overwrite to start anew"
    for name, value in plan.provenance.inputs.items():
        if run.provenance.inputs.get(name) != value:
            raise UserError(f"{run.root} holds a run with another {name}; {way_out}")
    difference = _first_difference(
        run.provenance.options, plain_options(plan.options), FREE_OPTIONS
    )
    if difference:
        flag, before, now = difference
        raise UserError(f"{run.root} holds a run with {flag} {before}, not {now}; {way_out}")


def _require_same_optimizer(plan: TrainingPlan, checkpoint: CheckpointRecord) -> None:
    """Any layout can go on from any other, but for this: megatron keeps two forms of the state."""
    flag = "--use-distributed-optimizer"
    was_sharded = bool(checkpoint.layout.get("use_distributed_optimizer"))
    if was_sharded != plan.options.parallel.use_distributed_optimizer:
        word, change = ("with", "give") if was_sharded else ("without", "leave out")
        raise UserError(
            f"{checkpoint.root} was written {word} {flag} and cannot go on otherwise; "
            f"{change} {flag}"
        )


def _first_difference(
    before: dict[str, Any], now: dict[str, Any], free: Collection[str] = ()
) -> tuple[str, Any, Any] | None:
    """The first option that is not as it was: its flag, what it was, what it is."""
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)
        if name in free or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            return _first_difference(old, new)
        return f"--{name.replace('_', '-')}", old, new
    return None
