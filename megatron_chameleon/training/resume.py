"""Whether a run starts, goes on or is finished, from what its folder holds."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts.checkpoint import (
    FOLDER_NAME,
    CheckpointRecord,
    CheckpointWarning,
    checkpoint_folders,
)
from megatron_chameleon.artifacts.checkpoint_upkeep import (
    finish_latest,
    go_back_to,
    remove_leftovers_of_run,
)
from megatron_chameleon.artifacts.files import put_all_back, writing
from megatron_chameleon.artifacts.provenance import plain_options
from megatron_chameleon.artifacts.training_run import METRICS_NAME, TrainingRun, keep_metrics_until
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.schedule import MixtureSchedule, Phase
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.way_out import BY_FLAGS, WayOut
from megatron_chameleon.training.whole_checkpoint import newest_whole_checkpoint

# These may differ when a run is continued: they change nothing of what is computed. The data, the
# first mixture and the weights that the run started from are compared by their hashes, wherever
# they lie; changes of the mixture that lie ahead may be others than were planned, but for whether a
# hook makes them, which checkpoints tell.
FREE_OPTIONS = (
    "corpus",
    "data_path",
    "split",
    "tokenizer_model",
    "tiktoken_pattern",
    "eod_token",
    "data_cache_path",
    "verify_corpus",
    "mixture",
    "mixture_change",
    "online",
    "pretrained_checkpoint",
    "run_dir",
    "micro_batch_size",
    "log_interval",
    "save_interval",
    "overwrite",
    "compile_layers",
    "deterministic",
    "dry_first_step",
    "parallel",
    "checkpointing",
    "guards",
    "stopping",
    "validation",
    "logging",
    "profiling",
)


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands: its last record, if any, and the checkpoint it goes on from.

    ``problems`` says what is wrong with newer checkpoints, if there are any.
    """

    run: TrainingRun | None = None
    checkpoint: CheckpointRecord | None = None
    problems: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Steps done."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def guard(self) -> dict[str, Any]:
        """What the judge of steps goes on from."""
        return self.checkpoint.guard if self.checkpoint else {}


def find_progress(plan: TrainingPlan, layout: Layout) -> Progress:
    """Look into the run's folder, and change nothing. Every rank calls this.

    A damaged checkpoint is passed over for the one before. Only a save that was killed between
    its last steps is finished.

    Raises:
        UserError: on every rank, if the folder holds a run of other options, corpus or mixture, or
            all its checkpoints are damaged.
    """
    run = from_main(lambda: _find_run(plan))
    if run is None:
        return Progress()
    found = newest_whole_checkpoint(plan.options.run_dir, layout, plan.way_out)
    if found.checkpoint:
        _require_same_optimizer(plan, found.checkpoint)
    resumed_schedule(plan, found.checkpoint)  # refuses what does not fit
    return Progress(run, found.checkpoint, tuple(found.problems))


def _find_run(plan: TrainingPlan) -> TrainingRun | None:
    """The run that the folder holds; None if it is to start."""
    run = check_run_folder(plan)
    if run is not None:
        with writing(run.root):
            put_all_back(run.root / FOLDER_NAME)
            finish_latest(run.root)
    return run


def check_run_folder(plan: TrainingPlan) -> TrainingRun | None:
    """The run that the folder holds; None if it is to start. Nothing is written.

    Raises:
        UserError: if it is a run of other options, corpus or mixture.
    """
    folder = plan.options.run_dir
    if plan.options.overwrite and TrainingRun.exists(folder):
        return None
    if not TrainingRun.exists(folder):
        if checkpoint_folders(folder):
            raise UserError(
                f"{folder} has checkpoints but no run.json, which says what they belong to; "
                f"{plan.way_out.elsewhere}"
            )
        return None
    run = TrainingRun.load(folder)
    _require_same(plan, run)
    return run


def go_back(progress: Progress, run_dir: Path) -> None:
    """Take the run in ``run_dir`` back to the step of ``progress``. Every rank calls this.

    What was logged later is dropped; newer checkpoints get other names, with a
    :class:`CheckpointWarning` if they are damaged.

    Raises:
        UserError: on every rank, if the folder cannot be written.
    """
    if progress.run is not None:
        from_main(lambda: _go_back(progress, run_dir))


def _go_back(progress: Progress, folder: Path) -> None:
    with writing(folder):
        moved = go_back_to(folder, progress.step) if progress.checkpoint else []
    if progress.problems:
        warnings.warn(
            f"{progress.problems[0]}: going on from step {progress.step}; kept as "
            f"{', '.join(map(str, moved))}",
            CheckpointWarning,
            stacklevel=2,
        )
    remove_leftovers_of_run(folder)
    keep_metrics_until(folder / METRICS_NAME, progress.step)


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
                f"{checkpoint.step} on, or {plan.way_out.anew}"
            )
    ahead = [p for p in plan.schedule.phases if p.first_sample >= max(checkpoint.samples, 1)]
    return MixtureSchedule((*past, *ahead))


def check_same_samples(
    samples: BlendedTokens, checkpoint: CheckpointRecord, way_out: WayOut = BY_FLAGS
) -> None:
    """Check that a resumed run reads the samples that it would have read without a stop.

    Raises:
        UserError: if the checkpoint was written with another version of the order, or its counts of
            samples per domain are not those of the order.
    """
    if checkpoint.order_version != samples.order_version:
        raise UserError(
            f"{checkpoint.root} has version {checkpoint.order_version} of the sample order of "
            f"--permutation {samples.permutation}, this release has version "
            f"{samples.order_version}; resume with the release that wrote it, or {way_out.anew}"
        )
    counts = samples.counts(checkpoint.samples).tolist()
    for name, count in zip(samples.data.names, counts, strict=True):
        if count != checkpoint.domain_samples.get(name):
            raise UserError(
                f"{checkpoint.root} says that {checkpoint.domain_samples.get(name)} samples of "
                f"'{name}' were drawn, where its weights ask for {count}: it is damaged or of "
                f"another version; use an earlier checkpoint, or {way_out.anew}"
            )


def _require_same(plan: TrainingPlan, run: TrainingRun) -> None:
    way_out, inputs = plan.way_out, plan.provenance.inputs
    names = list(run.mixture)
    if run.provenance.inputs.get("corpus") == inputs["corpus"] and names != plan.data.names:
        raise UserError(  # records are kept by these names
            f"{run.root} holds a run on the same data by other names: {', '.join(names)}, not "
            f"{', '.join(plan.data.names)}; give the files their names again, or {way_out}"
        )
    from_path = plan.options.data.data_path is not None
    labels = {"mixture": "mixture (run.json has its weights; the file must hold exactly these)"}
    if from_path:
        labels["corpus"] = "content of --data-path, --split or tokenizer"
    for name in {**inputs, **run.provenance.inputs}:
        if run.provenance.inputs.get(name) != inputs.get(name):
            label = labels.get(name, name)
            raise UserError(f"{run.root} holds a run with another {label}; {way_out}")
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
