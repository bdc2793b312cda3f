"""The folder of a run: its lock, --overwrite, and the records run.json and checkpoint.json."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import socket
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import Cost, MixturePhase, SampledTokens, Stopwatch, TrainingRun
from megatron_chameleon.artifacts.checkpoint import (
    CheckpointRecord,
    HookState,
    checkpoint_folders,
    step_folder,
)
from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.artifacts.training_run import Status
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.blend.token_data import TokenData
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.training.plan import TrainingPlan

LOCK_NAME = "run.lock"
FRESH_START = (
    "choose another folder (--run-dir, --work-dir or --output), or delete it to start from scratch "
    "(tools/pretrain_gpt.py: --overwrite)"
)
"""Hint at the end of messages about a run folder that holds another run."""
# The replaced run stays in its own folder, which may be a mount point or a link. The second name
# means that the move is complete, to recognize what a killed job left.
_BEING_MOVED, _REPLACED = ".being-replaced", ".replaced"


@contextlib.contextmanager
def locked_run_folder(folder: Path) -> Iterator[None]:
    """Lock ``folder`` against other jobs during the block. Collective.

    The folder is created if needed, and removed again if the block leaves it empty. On a file
    system without locks, other jobs are not kept out.

    Raises:
        UserError: on every rank, if another job holds the lock, or the folder cannot be created.
    """
    with contextlib.ExitStack() as stack:
        from_main(lambda: stack.enter_context(_locked_folder(folder)))
        yield


@contextlib.contextmanager
def starting_run(folder: Path, *, overwrite: bool) -> Iterator[None]:
    """Context manager for the first writes of a run to ``folder``. Collective.

    With ``overwrite``, the old run is moved aside before the block and deleted after it. If the
    block raises on rank 0, the folder is restored at once; if the process is killed, it is restored
    when the folder is next locked.

    Raises:
        UserError: on every rank, if the old run cannot be moved.
    """
    with contextlib.ExitStack() as stack:
        from_main(lambda: stack.enter_context(_starting_run(folder, overwrite)))
        yield


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    created = not folder.exists()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder / LOCK_NAME)
    try:
        with writing(folder):
            _restore(folder)
        yield
    finally:
        (folder / LOCK_NAME).unlink(missing_ok=True)
        os.close(lock)
        if created:
            with contextlib.suppress(OSError):  # not empty: it holds a run now
                folder.rmdir()


def _lock(path: Path) -> int:
    """Lock the file ``path`` until the returned descriptor is closed.

    A POSIX lock, which is not inherited by the forked processes that write a checkpoint and may
    outlive this one by some seconds.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.read(descriptor, 256).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(
                f"{path.parent} is in use by another job ({holder}): wait for it, end it, or "
                f"choose another folder; if there is no such job, delete {path}"
            ) from error
        except OSError:  # a file system without locks
            pass
        try:
            is_current = os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            is_current = False
        if is_current:
            with contextlib.suppress(OSError):  # disk full; the lock is held anyway
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return descriptor
        os.close(descriptor)  # the job that held the lock has just removed the file


@contextlib.contextmanager
def _starting_run(folder: Path, overwrite: bool) -> Iterator[None]:
    if overwrite and TrainingRun.exists(folder):
        with writing(folder):
            _move_aside(folder)
    before = set(folder.iterdir())
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before:
            _remove(path)
        _restore(folder)
        raise
    shutil.rmtree(folder / _REPLACED, ignore_errors=True)


def _move_aside(folder: Path) -> None:
    """Move the run in ``folder`` to the folder ``_REPLACED`` in it, completely or not at all."""
    aside, replaced = folder / _BEING_MOVED, folder / _REPLACED
    if replaced.exists():
        raise UserError(
            f"{replaced}, left from a run that was overwritten, cannot be deleted; close programs "
            "that have its files open, such as TensorBoard, and delete it"
        )
    try:
        aside.mkdir()
        for path in _contents(folder):
            os.replace(path, aside / path.name)
        os.replace(aside, replaced)
    except BaseException:
        _restore(folder)
        raise


def _restore(folder: Path) -> None:
    """Restore a run that was moved aside for one that did not start; delete it otherwise."""
    aside, replaced = folder / _BEING_MOVED, folder / _REPLACED
    # With both, the replaced one is a remainder that could not be deleted.
    if replaced.exists() and not aside.exists():
        if TrainingRun.exists(folder):
            shutil.rmtree(replaced, ignore_errors=True)
            return
        for path in _contents(folder):
            _remove(path)
        os.replace(replaced, aside)
    if aside.exists():
        for path in list(aside.iterdir()):
            os.replace(path, folder / path.name)
        aside.rmdir()


def _contents(folder: Path) -> list[Path]:
    ours = (LOCK_NAME, _BEING_MOVED, _REPLACED)
    return [path for path in folder.iterdir() if path.name not in ours]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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


class RunRecords:
    """Count sampled tokens and cost of a run, and write its records.

    Attributes:
        first_step: steps done when this process started.
        logged_step: last step whose tokens are counted.
        failed_saves: failed checkpoint saves over the whole run.
        extra_flops: floating-point operations in addition to training.
        stopwatch: started when this process began to train.
    """

    def __init__(
        self, plan: TrainingPlan, layout: Layout, samples: BlendedTokens, progress: Progress
    ) -> None:
        self.plan, self.layout, self.samples = plan, layout, samples
        self.first_step = self.logged_step = progress.step
        self.failed_saves = list(progress.run.failed_saves) if progress.run else []
        self.extra_flops = 0.0
        self.stopwatch = Stopwatch()
        self._cost_before = progress.run.cost if progress.run else Cost()
        self._sampled = Counter(progress.checkpoint.domain_tokens if progress.checkpoint else {})

    def count(self, step: int, tokens: Mapping[str, int]) -> None:
        """Add the tokens sampled per domain since the last log, up to ``step``."""
        self._sampled.update(tokens)
        self.logged_step = step

    def samples_at(self, step: int) -> int:
        """Samples of the first ``step`` steps."""
        return step * self.plan.options.global_batch_size

    def domain_samples(self, step: int) -> dict[str, int]:
        """Domain -> samples in the global batch of ``step``, without zeros."""
        before, after = (self.samples.counts(self.samples_at(s)) for s in (step - 1, step))
        counts = zip(self.plan.data.names, (after - before).tolist(), strict=True)
        return {name: count for name, count in counts if count}

    def sampled(self) -> dict[str, SampledTokens]:
        """Per-domain token and epoch counts up to the last log: target vs. actual."""
        return sampled_tokens(
            self.plan.data,
            self.samples.schedule,
            self.samples_at(self.logged_step),
            self.plan.options.seq_length,
            self._sampled,
        )

    def cost(self, step: int) -> Cost:
        """Cost of all ranks since this start of the run, up to ``step``."""
        tokens = (step - self.first_step) * self.plan.tokens_per_step
        flops = training_flops(self.plan.shape, tokens, self.plan.options.seq_length)
        return self.stopwatch.cost(flops + self.extra_flops, self.layout.world_size)

    def seconds(self) -> float:
        """Wall-clock seconds, over all starts of the run."""
        return self._cost_before.wall_seconds + self.stopwatch.seconds()

    def last_checkpoint(self, before_step: int | None = None) -> str | None:
        """Folder of the run's last checkpoint, optionally the last before a step, if any."""
        folders = checkpoint_folders(self.plan.options.run_dir)
        if before_step is not None:
            end = step_folder(self.plan.options.run_dir, before_step)
            folders = [folder for folder in folders if folder < end]
        return str(folders[-1]) if folders else None

    def checkpoint(
        self, step: int, guard: dict[str, Any], hook: HookState | None
    ) -> CheckpointRecord:
        """The record of the checkpoint after ``step`` steps, all of which are logged."""
        plan, samples = self.plan, self.samples_at(step)
        counts = self.samples.counts(samples).tolist()
        return CheckpointRecord(
            root=step_folder(plan.options.run_dir, step),
            model=dataclasses.asdict(plan.shape),
            step=step,
            samples=samples,
            domain_samples=dict(zip(plan.data.names, counts, strict=True)),
            mixture_phases=self._phases(step),
            domain_tokens=dict(self._sampled),
            tokenizer_hash=plan.data.tokenizer.sha256,
            corpus_hash=plan.data.hash,
            mixture_hash=plan.mixture.hash,
            layout=self.layout.describe(),
            files={},
            provenance=plan.provenance,
            guard=guard,
            hook=hook,
            order_version=self.samples.order_version,
        )

    def write_run(
        self, step: int, status: Status, skipped_steps: int, stopped_by: str | None = None
    ) -> None:
        """Update run.json, on rank 0.

        Raises:
            UserError: if the first or the last record cannot be written; otherwise a failure is a
                warning, and the previous record is kept.
        """
        if not self.layout.is_main:
            return
        plan, sampled, run_dir = self.plan, self.sampled(), self.plan.options.run_dir
        run = TrainingRun(
            root=run_dir,
            status=status,
            step=step,
            train_iters=plan.options.train_iters,
            tokens=step * plan.tokens_per_step,
            model=dataclasses.asdict(plan.shape),
            parameters=plan.shape.num_parameters,
            mixture={name: domain.weight for name, domain in sampled.items()},
            mixture_phases=self._phases(step),
            mixture_method=plan.mixture.method,
            domain_tokens=sampled,
            checkpoints=[str(path.relative_to(run_dir)) for path in checkpoint_folders(run_dir)],
            provenance=plan.provenance,
            cost=self._cost_before + self.cost(step),
            skipped_steps=skipped_steps,
            stopped_by=stopped_by,
            failed_saves=self.failed_saves,
        )
        try:
            run.save()
        except UserError as error:
            if status == "finished" or not TrainingRun.exists(run.root):
                raise
            warnings.warn(f"{error}; the previous record is kept", stacklevel=2)

    def _phases(self, step: int) -> list[MixturePhase]:
        """Mixture phases of the first ``step`` steps."""
        names = self.plan.data.names
        return [
            MixturePhase(phase.first_sample, dict(zip(names, phase.weights, strict=True)))
            for phase in self.samples.schedule.until(self.samples_at(step))
        ]


def sampled_tokens(
    data: TokenData,
    schedule: MixtureSchedule,
    samples: int,
    seq_length: int,
    actual: Mapping[str, int],
) -> dict[str, SampledTokens]:
    """Target and actual tokens per domain over the first ``samples`` samples.

    Args:
        data: the domains.
        schedule: mixture schedule.
        samples: samples read so far.
        seq_length: tokens per sample.
        actual: domain -> tokens counted in the batches; a missing domain counts 0.
    """
    weights = schedule.weights_at(max(samples - 1, 0))
    targets = schedule.target_samples(samples)
    return {
        domain.name: SampledTokens(
            weight=weight / sum(weights),
            target=target * seq_length,
            actual=actual.get(domain.name, 0),
            epochs=actual.get(domain.name, 0) / max(domain.tokens, 1),
        )
        for domain, weight, target in zip(data.domains, weights, targets, strict=True)
    }
