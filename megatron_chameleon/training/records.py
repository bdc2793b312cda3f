"""What a run writes about itself: run.json, and the record of each checkpoint."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron_chameleon.artifacts import Cost, DrawnTokens, MixturePhase, Stopwatch, TrainingRun
from megatron_chameleon.artifacts.checkpoint import (
    CheckpointRecord,
    HookState,
    checkpoint_folders,
    step_folder,
)
from megatron_chameleon.artifacts.training_run import Status
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.drawn import drawn_tokens
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.resume import Progress


class RunRecords:
    """Keeps count of what a run draws and costs, and writes it down.

    Attributes:
        first_step: steps that were done when this process began.
        logged_step: the last step whose tokens are counted in.
        failed_saves: checkpoints that could not be written, over the whole run.
        extra_flops: floating-point operations spent beyond those of training.
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
        self._got: Counter[str] = Counter()
        if progress.checkpoint:
            self._got.update(progress.checkpoint.domain_tokens)

    def count(self, step: int, drawn: Mapping[str, int]) -> None:
        """Count in the tokens that were drawn of each domain since the last log, up to ``step``."""
        self._got.update(drawn)
        self.logged_step = step

    def samples_at(self, step: int) -> int:
        """Samples of the first ``step`` steps."""
        return step * self.plan.options.global_batch_size

    def domain_samples(self, step: int) -> dict[str, int]:
        """Domain -> samples of the global batch that ``step`` is trained on, where it has any."""
        before, after = (self.samples.counts(self.samples_at(s)) for s in (step - 1, step))
        counts = zip(self.plan.data.names, (after - before).tolist(), strict=True)
        return {name: count for name, count in counts if count}

    def phases_done(self, step: int) -> list[MixturePhase]:
        """The weights that the samples of the first ``step`` steps were drawn by."""
        names = self.plan.data.names
        return [
            MixturePhase(phase.first_sample, dict(zip(names, phase.weights, strict=True)))
            for phase in self.samples.schedule.until(self.samples_at(step))
        ]

    def drawn(self) -> dict[str, DrawnTokens]:
        """Tokens and epochs per domain up to the last log, asked and got."""
        return drawn_tokens(
            self.plan.data,
            self.samples.schedule,
            self.samples_at(self.logged_step),
            self.plan.options.seq_length,
            self._got,
        )

    def checkpoint(
        self, step: int, guard: dict[str, Any], hook: HookState | None
    ) -> CheckpointRecord:
        """The record of the checkpoint that is written after ``step`` steps, all of them logged."""
        plan, samples = self.plan, self.samples_at(step)
        counts = self.samples.counts(samples).tolist()
        return CheckpointRecord(
            root=step_folder(plan.options.run_dir, step),
            model=dataclasses.asdict(plan.shape),
            step=step,
            samples=samples,
            domain_samples=dict(zip(plan.data.names, counts, strict=True)),
            mixture_phases=self.phases_done(step),
            domain_tokens=dict(self._got),
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
        """Bring run.json up to date, on rank 0.

        Raises:
            UserError: if it cannot be written, and is the first or the last; otherwise the one
                before stays, and a warning says so.
        """
        if not self.layout.is_main:
            return
        run = self._run(step, status, skipped_steps, stopped_by)
        try:
            run.save()
        except UserError as error:
            if status == "finished" or not TrainingRun.exists(run.root):
                raise
            warnings.warn(f"{error}; it stays as it was for now", stacklevel=2)

    def _run(
        self, step: int, status: Status, skipped_steps: int, stopped_by: str | None
    ) -> TrainingRun:
        plan, drawn, run_dir = self.plan, self.drawn(), self.plan.options.run_dir
        return TrainingRun(
            root=run_dir,
            status=status,
            step=step,
            train_iters=plan.options.train_iters,
            tokens=step * plan.tokens_per_step,
            model=dataclasses.asdict(plan.shape),
            parameters=plan.shape.num_parameters,
            mixture={name: domain.weight for name, domain in drawn.items()},
            mixture_phases=self.phases_done(step),
            mixture_method=plan.mixture.method,
            domain_tokens=drawn,
            checkpoints=[str(path.relative_to(run_dir)) for path in checkpoint_folders(run_dir)],
            provenance=plan.provenance,
            cost=self._cost_before + self.cost(step),
            skipped_steps=skipped_steps,
            stopped_by=stopped_by,
            failed_saves=self.failed_saves,
        )

    def cost(self, step: int) -> Cost:
        """What this process and its peers have spent, up to ``step``."""
        tokens = (step - self.first_step) * self.plan.tokens_per_step
        flops = training_flops(self.plan.shape, tokens, self.plan.options.seq_length)
        return self.stopwatch.cost(flops + self.extra_flops, self.layout.world_size)

    def last_checkpoint(self, before_step: int | None = None) -> str | None:
        """The folder of the run's last checkpoint, or of the last from before a step, if any."""
        folders = checkpoint_folders(self.plan.options.run_dir)
        if before_step is not None:
            end = step_folder(self.plan.options.run_dir, before_step)
            folders = [folder for folder in folders if folder < end]
        return str(folders[-1]) if folders else None

    def seconds(self) -> float:
        """Seconds on the clock, over all the times the run was continued."""
        return self._cost_before.wall_seconds + self.stopwatch.seconds()
