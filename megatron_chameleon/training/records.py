"""What a run records about itself: run.json, and each checkpoint's record."""

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
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.blend.token_data import TokenData
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.checkpointing import Progress
from megatron_chameleon.training.plan import TrainingPlan


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
        self._got: Counter[str] = Counter()
        if progress.checkpoint:
            self._got.update(progress.checkpoint.domain_tokens)

    def count(self, step: int, drawn: Mapping[str, int]) -> None:
        """Add the tokens sampled per domain since the last log, up to ``step``."""
        self._got.update(drawn)
        self.logged_step = step

    def samples_at(self, step: int) -> int:
        """Samples of the first ``step`` steps."""
        return step * self.plan.options.global_batch_size

    def domain_samples(self, step: int) -> dict[str, int]:
        """Domain -> samples in the global batch of ``step``, where there are any."""
        before, after = (self.samples.counts(self.samples_at(s)) for s in (step - 1, step))
        counts = zip(self.plan.data.names, (after - before).tolist(), strict=True)
        return {name: count for name, count in counts if count}

    def phases_done(self, step: int) -> list[MixturePhase]:
        """Mixture phases of the first ``step`` steps."""
        names = self.plan.data.names
        return [
            MixturePhase(phase.first_sample, dict(zip(names, phase.weights, strict=True)))
            for phase in self.samples.schedule.until(self.samples_at(step))
        ]

    def drawn(self) -> dict[str, DrawnTokens]:
        """Per-domain token and epoch counts up to the last log: target vs. actual."""
        return sampled_tokens(
            self.plan.data,
            self.samples.schedule,
            self.samples_at(self.logged_step),
            self.plan.options.seq_length,
            self._got,
        )

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
        """Update run.json, on rank 0.

        Raises:
            UserError: if the first or the last record cannot be written; otherwise a failure is a
                warning, and the previous record is kept.
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
        """Cost of all ranks since this start of the run, up to ``step``."""
        tokens = (step - self.first_step) * self.plan.tokens_per_step
        flops = training_flops(self.plan.shape, tokens, self.plan.options.seq_length)
        return self.stopwatch.cost(flops + self.extra_flops, self.layout.world_size)

    def last_checkpoint(self, before_step: int | None = None) -> str | None:
        """Folder of the run's last checkpoint, optionally the last before a step, if any."""
        folders = checkpoint_folders(self.plan.options.run_dir)
        if before_step is not None:
            end = step_folder(self.plan.options.run_dir, before_step)
            folders = [folder for folder in folders if folder < end]
        return str(folders[-1]) if folders else None

    def seconds(self) -> float:
        """Wall-clock seconds, over all starts of the run."""
        return self._cost_before.wall_seconds + self.stopwatch.seconds()


def sampled_tokens(
    data: TokenData,
    schedule: MixtureSchedule,
    samples: int,
    seq_length: int,
    got: Mapping[str, int],
) -> dict[str, DrawnTokens]:
    """Target and actual tokens per domain over the first ``samples`` samples.

    Args:
        data: the domains.
        schedule: mixture schedule.
        samples: samples read so far.
        seq_length: tokens per sample.
        got: domain -> tokens counted in the batches; a missing domain counts 0.
    """
    weights = schedule.weights_at(max(samples - 1, 0))
    asked = schedule.target_samples(samples)
    return {
        domain.name: DrawnTokens(
            weight=weight / sum(weights),
            asked=asked_samples * seq_length,
            got=got.get(domain.name, 0),
            epochs=got.get(domain.name, 0) / max(domain.tokens, 1),
        )
        for domain, weight, asked_samples in zip(data.domains, weights, asked, strict=True)
    }


def sampled_lines(drawn: Mapping[str, DrawnTokens]) -> str:
    """One line per domain: actual and target tokens, and epochs."""
    width = max(len(name) for name in drawn)
    return "\n".join(
        f"  {name:{width}}  {tokens.got:>15,} tokens of {tokens.asked:>15,.0f} asked, "
        f"{tokens.epochs:.2f} epochs"
        for name, tokens in drawn.items()
    )
