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
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.schedule import MixtureSchedule, Phase
from megatron_chameleon.errors import UserError
from megatron_chameleon.training.plan import TrainingPlan

# These may differ when a run is continued: they change nothing of what is computed. A corpus
# and the first mixture are compared by their hashes, wherever they lie; changes of the mixture that
# lie ahead may be others than were planned.
FREE_OPTIONS = (
    "corpus",
    "data_path",
    "split",
    "tokenizer_model",
    "eod_token",
    "data_cache_path",
    "verify_corpus",
    "mixture",
    "mixture_change",
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
    resumed_schedule(plan, checkpoint)  # refuses what does not fit, before anything is cut
    progress = Progress(run, checkpoint)
    keep_metrics_until(folder / METRICS_NAME, progress.step)
    return progress


def resumed_schedule(plan: TrainingPlan, checkpoint: CheckpointRecord | None) -> MixtureSchedule:
    """The weights that the run has been drawn by up to ``checkpoint``, then those of the plan.

    Raises:
        UserError: if the plan asks for a change before the checkpoint that was not made.
    """
    if checkpoint is None:
        return plan.schedule
    names = plan.data.names
    past = tuple(
        Phase(phase.first_sample, tuple(phase.weights[name] for name in names))
        for phase in checkpoint.mixture_phases
    )
    # What it began with is the same: the hashes of the mixtures agree.
    for phase in plan.schedule.until(checkpoint.samples)[1:]:
        if phase not in past:
            step = phase.first_sample // plan.options.global_batch_size
            raise UserError(
                f"--mixture-change {step}=...: the run is at step {checkpoint.step} and was not "
                f"drawn by these weights from step {step} on; give a step from "
                f"{checkpoint.step} on, or --overwrite to start anew"
            )
    ahead = [p for p in plan.schedule.phases if p.first_sample >= max(checkpoint.samples, 1)]
    return MixtureSchedule((*past, *ahead))


def check_same_samples(samples: BlendedTokens, checkpoint: CheckpointRecord) -> None:
    """Refuse samples of which the next ones are not those that the run would have read.

    Raises:
        UserError: if the domains would not go on where the checkpoint says they are.
    """
    counts = samples.counts(checkpoint.samples).tolist()
    for name, count in zip(samples.data.names, counts, strict=True):
        if count != checkpoint.domain_samples.get(name):
            raise UserError(
                f"{checkpoint.root} says that {checkpoint.domain_samples.get(name)} samples of "
                f"'{name}' were drawn, where its weights ask for {count}: it is damaged or of "
                "another version; use an earlier checkpoint, or --overwrite to start anew"
            )


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
    before: dict[str, Any], now: dict[str, Any], free: Collection[str]
) -> tuple[str, Any, Any] | None:
    """The first option that is not as it was: its flag, what it was, what it is."""
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)
        if name in free or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            inside = _first_difference(old, new, free)
            if inside:
                return inside
            continue
        return f"--{name.replace('_', '-')}", old, new
    return None
