"""Find, verify, resume from and write the checkpoints of a run."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from megatron_chameleon.artifacts.checkpoint import (
    FOLDER_NAME,
    CheckpointRecord,
    CheckpointWarning,
    checkpoint_folders,
    finish_latest,
    go_back_to,
    keep_last,
    remove_leftovers_of_run,
)
from megatron_chameleon.artifacts.files import put_all_back, writing
from megatron_chameleon.artifacts.record import json_values
from megatron_chameleon.artifacts.training_run import (
    METRICS_NAME,
    FailedSave,
    TrainingRun,
    keep_metrics_until,
)
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.schedule import MixtureSchedule, Phase
from megatron_chameleon.checkpoint.save import SaveError, plan_save
from megatron_chameleon.checkpoint.state import State
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import Layout, from_main, on_every_rank
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.run_folder import FRESH_START

if TYPE_CHECKING:
    from megatron_chameleon.training.records import RunRecords

# Options that may change on resume, since they do not affect results. Data, initial mixture and
# pretrained weights are compared by hash instead of by path. Planned mixture changes ahead may
# differ; whether a hook changes the mixture is checked against the checkpoint.
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
    """Progress of a run: its last record and the checkpoint to resume from, if any.

    ``problems`` are the errors of newer, damaged checkpoints.
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
        """State of the step guard."""
        return self.checkpoint.guard if self.checkpoint else {}


def find_progress(plan: TrainingPlan, layout: Layout) -> Progress:
    """Find the checkpoint to resume from. Every rank calls this.

    A damaged checkpoint is skipped in favor of the previous one. The folder is not changed, except
    to complete a save that was killed between its last steps.

    Raises:
        UserError: on every rank, if the folder holds a run with other options, corpus or mixture,
            or all its checkpoints are damaged.
    """
    run = from_main(lambda: _find_run(plan))
    if run is None:
        return Progress()
    found = newest_verified_checkpoint(plan.options.run_dir, layout)
    if found.checkpoint:
        _require_same_optimizer(plan, found.checkpoint)
    resumed_schedule(plan, found.checkpoint)  # raises on a conflict
    return Progress(run, found.checkpoint, tuple(found.problems))


def _find_run(plan: TrainingPlan) -> TrainingRun | None:
    """The existing run in the folder; None for a new run."""
    run = check_run_folder(plan)
    if run is not None:
        with writing(run.root):
            put_all_back(run.root / FOLDER_NAME)
            finish_latest(run.root)
    return run


def check_run_folder(plan: TrainingPlan) -> TrainingRun | None:
    """The existing run in the folder; None for a new run. Nothing is written.

    Raises:
        UserError: if it is a run with other options, corpus or mixture.
    """
    folder = plan.options.run_dir
    if plan.options.overwrite and TrainingRun.exists(folder):
        return None
    if not TrainingRun.exists(folder):
        if checkpoint_folders(folder):
            raise UserError(
                f"{folder} has checkpoints but no run.json, which describes their run; "
                "choose another folder"
            )
        return None
    run = TrainingRun.load(folder)
    _require_same(plan, run)
    return run


def go_back(progress: Progress, run_dir: Path) -> None:
    """Roll the run in ``run_dir`` back to the step of ``progress``. Every rank calls this.

    Later metrics are dropped; newer checkpoints are renamed, with a :class:`CheckpointWarning` if
    they are damaged.

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
    """Mixture schedule of the checkpoint up to its step, then that of the plan.

    Raises:
        UserError: if the plan has a change before the checkpoint that was not made.
    """
    if checkpoint is None:
        return plan.schedule
    names = plan.data.names
    past = tuple(
        Phase(phase.first_sample, tuple(phase.weights[name] for name in names))
        for phase in checkpoint.mixture_phases
    )
    # The initial mixture is the same: the hashes match.
    for phase in plan.schedule.until(checkpoint.samples)[1:]:
        if phase not in past:
            step = phase.first_sample // plan.options.global_batch_size
            raise UserError(
                f"--mixture-change {step}=...: the run is at step {checkpoint.step} and sampled by "
                f"other weights from step {step} on; pass a step >= {checkpoint.step}"
            )
    ahead = [p for p in plan.schedule.phases if p.first_sample >= max(checkpoint.samples, 1)]
    return MixtureSchedule((*past, *ahead))


def check_same_samples(samples: BlendedTokens, checkpoint: CheckpointRecord) -> None:
    """Check that a resumed run reads the same samples as an uninterrupted one.

    Raises:
        UserError: if the checkpoint has another version of the sample order, or its per-domain
            sample counts do not match the order.
    """
    if checkpoint.order_version != samples.order_version:
        raise UserError(
            f"{checkpoint.root} has version {checkpoint.order_version} of the sample order of "
            f"--permutation {samples.permutation}, this release has version "
            f"{samples.order_version}; resume with the release that wrote it, or start from scratch"
        )
    counts = samples.counts(checkpoint.samples).tolist()
    for name, count in zip(samples.data.names, counts, strict=True):
        if count != checkpoint.domain_samples.get(name):
            raise UserError(
                f"{checkpoint.root} records {checkpoint.domain_samples.get(name)} samples of "
                f"'{name}', its weights imply {count}: it is damaged or of another version; resume "
                "from an earlier checkpoint, or start from scratch"
            )


def _require_same(plan: TrainingPlan, run: TrainingRun) -> None:
    inputs = plan.provenance.inputs
    names = list(run.mixture)
    if run.provenance.inputs.get("corpus") == inputs["corpus"] and names != plan.data.names:
        raise UserError(  # records are kept by these names
            f"{run.root} holds a run whose data sets are named {', '.join(names)}, not "
            f"{', '.join(plan.data.names)}; rename the files back, or {FRESH_START}"
        )
    from_path = plan.options.data.data_path is not None
    labels = {"mixture": "mixture (run.json has its weights; the file must hold exactly these)"}
    if from_path:
        labels["corpus"] = "content of --data-path, --split or tokenizer"
    for name in {**inputs, **run.provenance.inputs}:
        if run.provenance.inputs.get(name) != inputs.get(name):
            label = labels.get(name, name)
            raise UserError(f"{run.root} holds a run with another {label}; {FRESH_START}")
    difference = _first_difference(run.provenance.options, json_values(plan.options), FREE_OPTIONS)
    if difference:
        flag, before, now = difference
        raise UserError(f"{run.root} holds a run with {flag} {before}, not {now}; {FRESH_START}")


def _require_same_optimizer(plan: TrainingPlan, checkpoint: CheckpointRecord) -> None:
    """Check ``--use-distributed-optimizer``: megatron's two state formats are incompatible."""
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
    """The first changed option: flag, old value, new value."""
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


@dataclasses.dataclass(frozen=True)
class Found:
    """The newest checkpoint that verifies, if any, and the errors of newer ones."""

    checkpoint: CheckpointRecord | None
    problems: list[str]


def newest_verified_checkpoint(run_dir: Path, layout: Layout) -> Found:
    """Find the newest checkpoint whose hashes verify. Every rank calls this.

    Raises:
        UserError: on every rank, if there are checkpoints and all of them are damaged.
    """
    folders = from_main(lambda: checkpoint_folders(run_dir))
    problems: list[str] = []
    for folder in reversed(folders):
        try:
            checkpoint = from_main(partial(CheckpointRecord.load, folder))
            verify_checkpoint(checkpoint, layout)
        except UserError as error:
            problems.append(str(error))
        else:
            return Found(checkpoint, problems)
    if problems:
        raise UserError(
            f"{problems[0]}: all checkpoints of {run_dir} are damaged; restore one from a copy, or "
            f"{FRESH_START}"
        )
    return Found(None, [])


def verify_checkpoint(checkpoint: CheckpointRecord, layout: Layout) -> None:
    """Verify the hashes of all files, sharded over the ranks.

    Raises:
        UserError: on every rank, if any file does not match its hash.
    """
    share = layout.rank, layout.world_size
    total = checkpoint.bytes_to_verify(*share)
    what = f"verifying step {checkpoint.step}"
    with progress_bar(total, "B", what, quiet=not layout.is_main) as bar:
        on_every_rank(lambda: checkpoint.verify(*share, bar.update))


class CheckpointWriter:
    """Write checkpoints, at most one at a time; every rank makes the same calls.

    A failed save is reported by a :class:`CheckpointWarning` and in ``records.failed_saves``;
    training continues, and the previous checkpoint is unchanged.
    """

    def __init__(self, records: RunRecords) -> None:
        options = records.plan.options
        self._options, self._run_dir = options.checkpointing, options.run_dir
        self._interval, self._records = options.save_interval, records
        self._queue = AsyncCallsQueue()
        self._in_flight: CheckpointRecord | None = None

    def save(self, state: State, record: CheckpointRecord, *, is_last: bool) -> None:
        """Write a checkpoint, or start an asynchronous save.

        Args:
            state: state to save; with ``--async-save`` it may change as soon as this returns.
            record: record of the checkpoint.
            is_last: whether the run stops after it. The save is then synchronous and must succeed.

        Raises:
            UserError: on every rank, if the last checkpoint cannot be written.
        """
        self.wait()
        try:
            request = plan_save(state, record, is_latest=True)
            if self._options.async_save and not is_last:
                self._queue.schedule_async_request(request)
                self._in_flight = record
                return
            request.execute_sync()
        except SaveError as error:
            if is_last:
                raise UserError(
                    f"{error}; free space and run the same command again: it goes on from "
                    f"{self._records.last_checkpoint() or 'the beginning'}"
                ) from error
            self._note_failure(record, error)
            return
        if not record.guard.get("streak"):  # keep the checkpoint from before the skipped steps
            self._delete_old()

    def poll(self) -> bool:
        """Whether the save in flight has ended, successfully or not."""
        return self._finish(blocking=False)

    def wait(self) -> bool:
        """Wait for the save in flight; return whether there was one."""
        return self._finish(blocking=True)

    def _finish(self, *, blocking: bool) -> bool:
        record = self._in_flight
        if record is None:
            return False
        try:
            if not self._queue.maybe_finalize_async_calls(blocking=blocking):
                return False
        except SaveError as error:
            self._note_failure(record, error)
        else:
            self._delete_old()
        self._in_flight = None
        return True

    def _note_failure(self, record: CheckpointRecord, error: SaveError) -> None:
        self._records.failed_saves.append(FailedSave(record.step, str(error)))
        before = self._records.last_checkpoint()
        warnings.warn(
            f"{error}; training goes on, and {before or 'no checkpoint'} is the last one: free "
            f"space, the next is tried after the next {self._interval} steps",
            CheckpointWarning,
            stacklevel=2,
        )

    def _delete_old(self) -> None:
        if not self._records.layout.is_main:
            return
        try:
            keep_last(self._run_dir, self._options.keep_last_checkpoints)
        except OSError as error:
            warnings.warn(f"cannot delete an old checkpoint: {error}", CheckpointWarning, 2)
