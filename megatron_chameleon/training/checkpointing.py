"""Find, verify, resume from and write the checkpoints of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.checkpoint import (
    FOLDER_NAME,
    BestTarget,
    CheckpointRecord,
    CheckpointWarning,
    checkpoint_folders,
    go_back_to,
    keep_last,
    step_folder,
)
from megatron_chameleon.artifacts.files import finish_replacements, writing
from megatron_chameleon.artifacts.provenance import recorded_options
from megatron_chameleon.artifacts.record import (
    check_values,
    differences,
)
from megatron_chameleon.artifacts.training_run import (
    METRICS_NAME,
    FailedSave,
    TrainingRun,
    keep_metrics_until,
)
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.blend.schedule import MixtureSchedule, check_ramps
from megatron_chameleon.checkpoint.save import SaveError, plan_save
from megatron_chameleon.checkpoint.state import State
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.parallel.layout import Layout, from_main, on_every_rank
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.ranges import flag_of
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.records import Progress, RunRecords
from megatron_chameleon.training.run_folder import FRESH_START

# These options affect results, so they must not change on resume. A resume also compares the model,
# the hashes of the corpus, the initial mixture and the pretrained weights, and the mixture changes
# and the hook that the checkpoint records.
FIXED_OPTIONS = (
    "seq_length",
    "train_iters",
    "global_batch_size",
    "target_tokens",
    "loss_weights",
    "seed",
    "bf16",
    "hidden_dropout",
    "attention_dropout",
    "permutation",
    *(field.name for field in dataclasses.fields(DocumentBoundaryOptions)),
    *(field.name for field in dataclasses.fields(OptimizerOptions)),
)


def find_progress(plan: TrainingPlan, layout: Layout) -> Progress:
    """Find the checkpoint to resume from. Collective.

    A damaged checkpoint is skipped in favor of the previous one. The folder is not changed, except
    to complete a save that was killed while it replaced a checkpoint.

    Raises:
        UserError: on every rank, if the folder holds a run with other options, corpus or mixture,
            or all of its checkpoints are damaged.
    """

    def find_run() -> TrainingRun | None:
        run = check_run_folder(plan)
        if run is not None:
            with writing(run.root):
                finish_replacements(run.root / FOLDER_NAME)
        return run

    run = from_main(find_run)
    if run is None:
        return Progress()
    checkpoint, problems = newest_verified_checkpoint(plan.options.run_dir, layout)
    sharded = plan.options.parallel.use_distributed_optimizer
    if checkpoint and bool(checkpoint.layout.get("use_distributed_optimizer")) != sharded:
        # megatron cannot load this state: the distributed optimizer's state has another format.
        raise UserError(
            f"{checkpoint.root} holds optimizer state in another format; "
            f"{'leave out' if sharded else 'pass'} --use-distributed-optimizer to resume from it"
        )
    return Progress(run, checkpoint, tuple(problems))


def check_run_folder(plan: TrainingPlan) -> TrainingRun | None:
    """Read run.json, and check that this command may resume the run; return None for a new run.

    Raises:
        UserError: if the run in the folder has other options, another corpus or another mixture.
    """
    folder = plan.options.run_dir
    if not TrainingRun.exists(folder):
        if checkpoint_folders(folder):
            raise UserError(
                f"{folder} has checkpoints, but no run.json that describes their run; "
                "choose another folder"
            )
        return None
    if plan.options.overwrite:
        return None
    run = TrainingRun.load(folder)
    options_before, inputs_before = run.provenance.options, run.provenance.inputs
    options, inputs = recorded_options(plan.options), plan.provenance.inputs
    for name in {**inputs, **inputs_before}:
        if inputs_before.get(name) != inputs.get(name):
            hashes = (hashed.get(name, "none")[:8] for hashed in (inputs_before, inputs))
            raise UserError(
                f"{run.root} holds a run with another {name} (SHA-256 {', not '.join(hashes)}); "
                f"{FRESH_START}"
            )
    before = _flat(options_before)
    now = _flat(options)
    where, hint = f"{run.root}/{TrainingRun.FILE_NAME}", FRESH_START
    config = check_values(where, ModelConfig, run.model, hint, "model")
    before, now = before | dataclasses.asdict(config), now | dataclasses.asdict(plan.config)
    for name in (*differences(config, plan.config), *FIXED_OPTIONS):
        if before.get(name) != now.get(name):
            raise UserError(
                f"{run.root} holds a run with {flag_of(name)} {before.get(name)}, not "
                f"{now.get(name)}; {FRESH_START}"
            )
    return run


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    """Options without nesting."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat


def verify_files(record: Corpus | CheckpointRecord, what: str, layout: Layout) -> None:
    """Verify the hashes of the files of ``record``; each rank verifies some of them. Collective.

    Raises:
        UserError: on every rank, if any file does not match its hash.
    """
    shard = layout.rank, layout.world_size
    total, quiet = record.bytes_to_verify(*shard), not layout.is_main
    with progress_bar(total, "B", f"verifying {what}", quiet=quiet) as bar:
        on_every_rank(partial(record.verify, *shard, bar.update))


def newest_verified_checkpoint(
    run_dir: Path, layout: Layout
) -> tuple[CheckpointRecord | None, list[str]]:
    """Find the newest undamaged checkpoint, and the errors of newer checkpoints. Collective.

    Raises:
        UserError: on every rank, if there are checkpoints and all of them are damaged.
    """
    problems: list[str] = []
    for folder in reversed(from_main(lambda: checkpoint_folders(run_dir))):
        try:
            checkpoint = from_main(partial(CheckpointRecord.load, folder))
            verify_files(checkpoint, f"step {checkpoint.step}", layout)
        except UserError as error:
            problems.append(str(error))
        else:
            return checkpoint, problems
    if problems:
        raise UserError(
            f"{problems[0]}: all checkpoints of {run_dir} are damaged; restore one from a copy, or "
            f"{FRESH_START}"
        )
    return None, []


def resumed_schedule(plan: TrainingPlan, checkpoint: CheckpointRecord | None) -> MixtureSchedule:
    """Join the mixture phases of the checkpoint and the plan's phases after that checkpoint.

    Raises:
        UserError: if the plan changes the mixture before the step of the checkpoint, and the
            checkpoint does not record this change; if it changes the mixture before a ramp of the
            checkpoint has ended; or if ``--max-repetition-action`` has other effects than before.
    """
    if checkpoint is None:
        return plan.schedule
    past = MixtureSchedule.from_record(checkpoint.mixture_phases, plan.data.names).phases
    # check_run_folder has compared the hashes of the initial mixtures.
    if not np.allclose(past[0].shares, plan.schedule.phases[0].shares, rtol=1e-9, atol=0.0):
        raise UserError(
            f"{checkpoint.root}: the run began with other weights, because of another "
            "--max-repetition-action, other limits (max_repetition), or, with redistribute, other "
            f"mixture changes; use those of its start, or {FRESH_START}"
        )
    for phase in plan.schedule.until(checkpoint.samples)[1:]:
        if phase not in past:
            step = phase.first_sample // plan.options.global_batch_size
            raise UserError(
                f"--mixture-change {step}=...: the run is at step {checkpoint.step}, and used "
                f"another mixture from step {step} on; pass a step >= {checkpoint.step}"
            )
    ahead = [p for p in plan.schedule.phases if p.first_sample >= max(checkpoint.samples, 1)]
    schedule = MixtureSchedule((*past, *ahead))
    check_ramps(schedule, plan.options.global_batch_size)
    return schedule


def check_same_samples(samples: BlendedTokens, checkpoint: CheckpointRecord) -> None:
    """Check that a resumed run reads the same samples as an uninterrupted run.

    Raises:
        UserError: if the checkpoint has another version of the sample order, or its per-domain
            sample counts do not match the order.
    """
    if checkpoint.order_version != samples.order_version:
        raise UserError(
            f"{checkpoint.root} has version {checkpoint.order_version} of the sample order of "
            f"--permutation {samples.permutation}, but this release has version "
            f"{samples.order_version}; resume with the release that wrote it, or start from scratch"
        )
    counts = samples.counts(checkpoint.samples).tolist()
    for name, count in zip(samples.data.names, counts, strict=True):
        if count != checkpoint.domain_samples.get(name):
            raise UserError(
                f"{checkpoint.root} records {checkpoint.domain_samples.get(name)} samples of "
                f"'{name}', but its mixture implies {count}: it is damaged or was written by "
                "another version; resume from an earlier checkpoint, or start from scratch"
            )


def roll_back(progress: Progress, run_dir: Path) -> None:
    """Roll the run in ``run_dir`` back to the step of ``progress``, on rank 0.

    Metrics of later steps are deleted. Newer checkpoints are renamed; if they are damaged, a
    :class:`CheckpointWarning` is issued.

    Raises:
        UserError: if the folder cannot be written.
    """
    if progress.run is None:
        return
    with writing(run_dir):
        moved = go_back_to(run_dir, progress.step)
    if progress.problems:
        warnings.warn(
            f"{progress.problems[0]}: resuming from step {progress.step}; renamed to "
            f"{', '.join(map(str, moved))}",
            CheckpointWarning,
            stacklevel=2,
        )
    # A run that starts again validates again before its first step, which is logged as step 0.
    keep_metrics_until(run_dir / METRICS_NAME, progress.step or -1)


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Keep processes forked in the block from collecting this process's garbage.

    The writer of an asynchronous save is forked. If it destroyed a process group, it would wait
    forever for threads that exist in this process only.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class CheckpointWriter:
    """Write checkpoints, at most one at a time; every rank makes the same calls.

    A failed save is reported by a :class:`CheckpointWarning` and in ``records.failed_saves``;
    training continues, and the previous checkpoint is unchanged. run.json is updated after each
    save.
    """

    def __init__(self, records: RunRecords) -> None:
        self._records, self._options = records, records.plan.options
        self._queue = AsyncCallsQueue()
        self._in_flight: CheckpointRecord | None = None

    def save(self, state: State, best: BestTarget | None, *, is_last: bool) -> None:
        """Write a checkpoint after the last step, or start an asynchronous save.

        Read the meter first.

        Args:
            state: state of the model; with ``--async-save``, the caller may modify it after this
                call.
            best: the lowest target loss once this checkpoint is complete.
            is_last: whether the run stops after this save. The last save is synchronous and must
                succeed.

        Raises:
            UserError: on every rank, if the last checkpoint cannot be written.
        """
        self.finish()
        record = self._record(best)
        try:
            request = plan_save(state, record)
            if self._options.checkpointing.async_save and not is_last:
                with _garbage_kept():
                    self._queue.schedule_async_request(request)
                self._in_flight = record
            else:
                request.execute_sync()
                self._records.state.best = record.best
                # During a streak of skipped steps, no checkpoint is deleted, so that the one before
                # the streak is kept.
                if not record.guard.get("streak"):
                    self._delete_old()
        except SaveError as error:
            if is_last:
                raise UserError(
                    f"{error}; free space and run the same command again, which resumes from "
                    f"{self._records.last_checkpoint() or 'step 0'}"
                ) from error
            self._report_failure(record, error)
        self._records.write_run("running")

    def _record(self, best: BestTarget | None) -> CheckpointRecord:
        """Collect the record of a checkpoint after the last step from the parts of the run."""
        records = self._records
        plan, layout, step = records.plan, records.layout, records.step
        return CheckpointRecord(
            root=step_folder(plan.options.run_dir, step),
            model=dataclasses.asdict(plan.config),
            step=step,
            tokenizer_hash=plan.data.tokenizer.sha256,
            corpus_hash=plan.data.hash,
            mixture_hash=plan.mixture.hash,
            layout=layout.describe(),
            files={},
            provenance=plan.provenance,
            best=best,
            **records.state.state_dict(records.samples_at(step)),
        )

    def finish(self, *, blocking: bool = True) -> None:
        """Finish the asynchronous save, if there is one.

        Args:
            blocking: whether to wait until the save has ended.
        """
        record = self._in_flight
        if record is None:
            return
        try:
            if not self._queue.maybe_finalize_async_calls(blocking=blocking):
                return
        except SaveError as error:
            self._report_failure(record, error)
        else:
            self._records.state.best = record.best
            self._delete_old()
        self._in_flight = None
        self._records.write_run("running")

    def _report_failure(self, record: CheckpointRecord, error: SaveError) -> None:
        self._records.failed_saves.append(FailedSave(record.step, str(error)))
        warnings.warn(
            f"{error}; training continues, and the last checkpoint is "
            f"{self._records.last_checkpoint() or 'none'}: free space before the next save, in "
            f"{self._options.save_interval} steps",
            CheckpointWarning,
            stacklevel=2,
        )

    def _delete_old(self) -> None:
        if self._records.layout.is_main:
            try:
                options, best = self._options.checkpointing, self._records.state.best
                kept = [*options.keep_steps]
                if best and self._options.target.keep_best:
                    kept.append(best.step)
                keep_last(self._options.run_dir, options.keep_last_checkpoints, kept)
            except OSError as error:
                warnings.warn(f"cannot delete an old checkpoint: {error}", CheckpointWarning, 2)
