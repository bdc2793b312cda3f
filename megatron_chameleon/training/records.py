"""Records of a run: its log, run.json, and the records of its checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import warnings
from collections.abc import Mapping
from typing import Any

from megatron_chameleon.artifacts import Cost, SampledTokens, Stopwatch, TrainingRun
from megatron_chameleon.artifacts.checkpoint import (
    BestTarget,
    CheckpointRecord,
    checkpoint_folders,
    step_folder,
)
from megatron_chameleon.artifacts.training_run import BatchLayout, Status
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.corpus.domains import describe_cut
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import DENSE_BF16_PEAK, model_flops_utilization, training_flops
from megatron_chameleon.parallel.layout import Layout, device_name, from_main
from megatron_chameleon.training.guard import StepGuard
from megatron_chameleon.training.hook import TrainingHook, save_hook
from megatron_chameleon.training.metrics import (
    Figures,
    Interval,
    IntervalMeter,
    Logger,
    PhaseTimers,
    open_loggers,
)
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.step import StepResult


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a run: its run.json and the checkpoint to resume from, if any.

    ``problems`` are the errors of newer checkpoints, which are damaged.
    """

    run: TrainingRun | None = None
    checkpoint: CheckpointRecord | None = None
    problems: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self.checkpoint.step if self.checkpoint else 0


@dataclasses.dataclass
class RunState:
    """The state of a run besides the model. Each part saves itself for a checkpoint's record.

    Attributes:
        samples: the training samples.
        guard: the guard that skips steps.
        meter: losses and tokens.
        hook: the training hook.
        best: the lowest target loss so far; with --keep-best, of the complete checkpoints.
    """

    samples: BlendedTokens
    guard: StepGuard
    meter: IntervalMeter
    hook: TrainingHook
    best: BestTarget | None = None

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        """Collect the parts' states after ``num_samples`` samples, by field of the record."""
        return {
            **self.samples.state_dict(num_samples),
            "domain_tokens": self.meter.state_dict(),
            "guard": self.guard.state_dict(),
            "hook": save_hook(self.hook),
        }


class RunRecords:
    """Count the steps of a run, and write the run's log and records.

    Attributes:
        plan: plan of the run.
        layout: layout of the ranks.
        progress: progress of the run when this process started.
        state: the parts of the run that checkpoints record.
        step: number of steps done.
        stopped_by: why the run stops before its last step, or None.
        failed_saves: failed checkpoint saves over the whole run.
        validation_flops: floating-point operations of validations since this process started.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        layout: Layout,
        samples: BlendedTokens,
        progress: Progress,
        hook: TrainingHook,
    ) -> None:
        self.plan, self.layout, self.progress, self.step = plan, layout, progress, progress.step
        guard, meter = StepGuard(plan.options.guards), IntervalMeter(plan.data.names, layout)
        self.state = RunState(samples, guard, meter, hook, self._best_before(progress))
        if progress.checkpoint:
            guard.load_state_dict(progress.checkpoint.guard)
            meter.load_state_dict(progress.checkpoint.domain_tokens)
        self.stopped_by: str | None = None
        self.failed_saves = list(progress.run.failed_saves) if progress.run else []
        self.validation_flops = 0.0
        self._stopwatch = Stopwatch()
        self._loggers: list[Logger] = []

    def _batch_layouts(self) -> list[BatchLayout]:
        """Batch layouts of all steps: those before this process, and its own if it differs."""
        progress = self.progress
        recorded = progress.run.batch_layouts if progress.run else []
        layouts = [layout for layout in recorded if layout.first_step < progress.step]
        sizes = self.layout.data_size, self.plan.options.micro_batch_size
        if [(last.data_parallel_size, last.micro_batch_size) for last in layouts[-1:]] != [sizes]:
            layouts.append(BatchLayout(progress.step, *sizes))
        return layouts

    def _best_before(self, progress: Progress) -> BestTarget | None:
        """The lowest loss of this target up to the checkpoint to resume from. Collective.

        With --keep-best, it is None if its checkpoint was deleted.
        """
        best = progress.checkpoint.best if progress.checkpoint else None
        if best is None or self.plan.target is None or best.measured != self.plan.target_hash:
            return None
        folder = step_folder(self.plan.options.run_dir, best.step)
        if self.plan.options.target.keep_best and not from_main(folder.exists):
            return None
        return best

    def open_loggers(self) -> None:
        """Open the loggers, on rank 0."""
        self._loggers = open_loggers(self.plan.options, self.progress.step)

    def close_loggers(self) -> None:
        """Close the loggers."""
        for logger in self._loggers:
            with contextlib.suppress(OSError):  # a failed write has already been reported
                logger.close()

    @property
    def is_done(self) -> bool:
        """Whether all steps of the run are done."""
        return self.step >= self.plan.options.train_iters

    def add(self, result: StepResult) -> None:
        """Count a step, and add its losses to the meter."""
        self.step += 1
        self.state.meter.add(result)

    def samples_at(self, step: int) -> int:
        """Number of samples in the first ``step`` steps."""
        return step * self.plan.options.global_batch_size

    def domain_samples(self) -> dict[str, int]:
        """Domain -> samples in the global batch of the last step, without zeros."""
        steps = self.step - 1, self.step
        before, after = (self.state.samples.counts(self.samples_at(step)) for step in steps)
        counts = zip(self.plan.data.names, (after - before).tolist(), strict=True)
        return {name: count for name, count in counts if count}

    def sampled(self) -> dict[str, SampledTokens]:
        """Per-domain token and epoch counts up to the last log: target vs. actual."""
        data, meter, schedule = self.plan.data, self.state.meter, self.state.samples.schedule
        samples = self.samples_at(self.step - meter.steps)
        weights = schedule.weights_at(max(samples - 1, 0))
        targets = schedule.target_samples(samples)
        return {
            domain.name: SampledTokens(
                weight=weight / sum(weights),
                target=target * self.plan.options.seq_length,
                actual=meter.sampled_tokens[domain.name],
                epochs=meter.sampled_tokens[domain.name] / max(domain.tokens, 1),
            )
            for domain, weight, target in zip(data.domains, weights, targets, strict=True)
        }

    def cost(self) -> Cost:
        """Cost over all ranks since this process started to train."""
        tokens = (self.step - self.progress.step) * self.plan.tokens_per_step
        flops = training_flops(self.plan.config, tokens, self.plan.options.seq_length)
        flops += self.validation_flops + self.state.hook.flops
        return self._stopwatch.cost(flops, self.layout.world_size)

    def _cost_before(self) -> Cost:
        """Cost of the run before this process."""
        return self.progress.run.cost if self.progress.run else Cost()

    def last_checkpoint(self, before_step: int | None = None) -> str | None:
        """Folder of the last checkpoint; None without a checkpoint.

        With ``before_step``, only checkpoints before that step are considered.
        """
        run_dir = self.plan.options.run_dir
        end = step_folder(run_dir, before_step or self.step + 1)
        folders = [folder for folder in checkpoint_folders(run_dir) if folder < end]
        return str(folders[-1]) if folders else None

    def log(
        self,
        interval: Interval,
        lr: float,
        validation_loss: Mapping[str, float],
        target_loss: float | None,
        phases: PhaseTimers,
    ) -> None:
        """Print and log an interval, on rank 0; the measured speed excludes the time for logging.

        Args:
            interval: measurements since the last log.
            lr: learning rate of the last step.
            validation_loss: domain -> loss; empty if this step has no validation.
            target_loss: loss of the target, if there is one and this step has a validation.
            phases: timers of the training phases, which are read.
        """
        plan, guard = self.plan, self.state.guard
        phase_seconds, skipped = phases.read(), guard.unlogged
        guard.unlogged = []
        speed = self._speed(interval)
        seconds = self._stopwatch.seconds()
        hook = self.state.hook.metrics()
        figures = {
            "tokens": self.step * plan.tokens_per_step,
            "lr": lr,
            "seconds": round(self._cost_before().wall_seconds + seconds, 3),
            **dataclasses.asdict(interval),
            **({"validation_loss": dict(validation_loss)} if validation_loss else {}),
            **({"target_loss": target_loss} if target_loss is not None else {}),
            "skipped_steps": guard.skipped,
            **({"skipped": [dataclasses.asdict(s) for s in skipped]} if skipped else {}),
            **speed,
            **({"hook": hook} if hook else {}),
            "sampled_tokens": {
                name: {"target": round(d.target), "actual": d.actual, "epochs": round(d.epochs, 4)}
                for name, d in self.sampled().items()
            },
            "phase_seconds": phase_seconds,
        }
        if self.layout.is_main:
            with phases.during("logging"):
                print(self._line(interval, lr, speed, seconds))
                if validation_loss:
                    self._print_validation(f"after {self._done}", validation_loss, target_loss)
                self._write(figures)
        self.state.meter.restart_clock()

    def _speed(self, interval: Interval) -> dict[str, float]:
        """TFLOP/s per device; with --bf16 also MFU, since DENSE_BF16_PEAK is that of bfloat16."""
        options = self.plan.options
        flops_per_token = training_flops(self.plan.config, 1, options.seq_length)
        per_device = interval.tokens_per_second / self.layout.world_size
        speed = {"tflops_per_second_per_device": flops_per_token * per_device / 1e12}
        peak = DENSE_BF16_PEAK.get(device_name(self.layout.device)) if options.bf16 else None
        mfu = model_flops_utilization(flops_per_token, per_device, peak)
        return speed if mfu is None else {**speed, "mfu": mfu}

    @property
    def _done(self) -> str:
        last = self.plan.options.train_iters
        return f"step {self.step:{len(str(last))}d}/{last}"

    def _line(
        self, interval: Interval, lr: float, speed: Mapping[str, float], seconds: float
    ) -> str:
        """Format a line of the log, ``seconds`` after the start of this process."""
        skipped, steps = self.state.guard.skipped, self.step - self.progress.step
        left = seconds / steps * (self.plan.options.train_iters - self.step)
        parts = [
            self._done,
            f"loss {interval.loss:.4f}",
            f"lr {lr:.2e}",
            f"grad norm {interval.grad_norm:.2f}",
            f"{interval.tokens_per_second:,.0f} tokens/s",
            f"{speed['tflops_per_second_per_device']:.3g} TFLOP/s",
            *([f"{speed['mfu']:.1%} MFU"] if "mfu" in speed else []),
            *([f"{skipped} skipped"] if skipped else []),
            f"{format_duration(left)} left",
        ]
        return " | ".join(parts)

    def log_first(self, validation_loss: Mapping[str, float], target_loss: float | None) -> None:
        """Print and log the validation before the first step, on rank 0."""
        if self.layout.is_main:
            self._print_validation("before the first step", validation_loss, target_loss)
            target = {} if target_loss is None else {"target_loss": target_loss}
            self._write({"tokens": 0, "validation_loss": dict(validation_loss), **target})

    def _print_validation(
        self, when: str, losses: Mapping[str, float], target_loss: float | None
    ) -> None:
        by_name = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        target = "" if target_loss is None else f" | target loss {target_loss:.4f}"
        print(f"validation {when} | loss {by_name}{target}")

    def _write(self, figures: Figures) -> None:
        """Pass ``figures`` of this step to the loggers; a logger's failure is a warning."""
        for logger in self._loggers:
            try:
                logger.log(self.step, figures)
            except OSError as error:
                warnings.warn(f"cannot write metrics of step {self.step}: {error}", stacklevel=3)

    def print(self, message: str) -> None:
        """Print ``message`` on rank 0."""
        if self.layout.is_main:
            print(message)

    def start_message(self) -> str:
        """Message at the start of training: model, steps, layout and mixture."""
        plan, layout, step = self.plan, self.layout, self.step
        options, size, schedule = plan.options, plan.config, self.state.samples.schedule
        name = options.model or f"{size.num_layers} layers of width {size.hidden_size}"
        epochs = plan.epochs(schedule)
        weights = (
            f"{name} {domain.weight:.3f} ({epochs[name]:.2f} epochs)"
            for name, domain in self.sampled().items()
        )
        phases = [
            f"from step {phase.first_sample // options.global_batch_size}"
            + (
                f", linearly until step {phase.ramp_end // options.global_batch_size}: "
                if phase.ramp_samples
                else ": "
            )
            + ", ".join(f"{n} {w:.3f}" for n, w in zip(plan.data.names, phase.weights, strict=True))
            for phase in schedule.phases
            if max(phase.first_sample, phase.ramp_end - 1) >= max(self.samples_at(step), 1)
        ]
        lines = [
            f"{f'resuming at step {step}' if step else 'training'}: {name}, "
            f"{plan.config.num_parameters:,} parameters, "
            f"{options.train_iters} steps of {plan.tokens_per_step:,} tokens on "
            f"{layout.world_size} x {device_name(layout.device)} (tensor {layout.tensor_size}, "
            f"pipeline {layout.pipeline_size}, data {layout.data_size})",
            *(
                [f"initial weights: {plan.pretrained.where}", *plan.pretrained.left_out]
                if plan.pretrained and not step
                else []
            ),
            *describe_cut(options.tokens, options.target_tokens),
            f"mixture {plan.mixture.method}: {', '.join(weights)}",
            *(
                f"max_repetition: the weight of '{name}' is lowered, from {before:.2f} epochs in "
                f"this run to {epochs[name]:.2f}"
                for name, before in plan.limited.items()
            ),
            *phases,
            *([f"target: {describe_shares(plan.target.shares)}"] if plan.target else []),
            *self._describe_objective(),
        ]
        return "\n".join(lines)

    def _describe_objective(self) -> list[str]:
        """Describe --loss-weights, and each domain's share of the weighted tokens, if any."""
        if (factors := self.plan.loss_weights) is None:
            return []
        names, weights = self.plan.data.names, [d.weight for d in self.sampled().values()]
        parts = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        total = math.fsum(parts) or 1.0
        given = ", ".join(f"{n} {factor:g}" for n, factor in zip(names, factors, strict=True))
        shares = {name: part / total for name, part in zip(names, parts, strict=True)}
        return [f"loss weights: {given}; shares of the weighted tokens: {describe_shares(shares)}"]

    def end_message(self) -> str:
        """Message at the end of training: tokens, cost and the next command to run."""
        options, cost, best = self.plan.options, self.cost(), self.state.best
        lines = [
            f"trained to step {self.step} in {format_duration(cost.wall_seconds)}, "
            f"{cost.flops:.2e} FLOPs",
            *(
                f"  {name}: {tokens.actual:,} tokens sampled (target {tokens.target:,.0f}), "
                f"{tokens.epochs:.2f} epochs"
                for name, tokens in self.sampled().items()
            ),
            f"checkpoint: {step_folder(options.run_dir, self.step)}"
            if self.state.guard.updates
            else f"no checkpoint: none of the {self.step} steps has updated the model",
            *([f"lowest target loss: {best.loss:.4f} after step {best.step}"] if best else []),
            f"stopped by {self.stopped_by} at step {self.step} of {options.train_iters}; "
            "run the same command again to resume"
            if self.stopped_by
            else "next: megatron-chameleon compute_mixture, or evaluate perplexity, with "
            f"--corpus {options.corpus or 'CORPUS'} --checkpoint {options.run_dir}",
        ]
        return "\n".join(lines)

    def write_run(self, status: Status) -> None:
        """Update run.json, on rank 0.

        Raises:
            UserError: if the first or the last record cannot be written. If another record cannot
                be written, a warning is issued, and the previous record is kept.
        """
        if not self.layout.is_main:
            return
        plan, sampled, run_dir = self.plan, self.sampled(), self.plan.options.run_dir
        samples, best = self.state.samples, self.state.best
        run = TrainingRun(
            root=run_dir,
            status=status,
            step=self.step,
            train_iters=plan.options.train_iters,
            tokens=self.step * plan.tokens_per_step,
            model=dataclasses.asdict(plan.config),
            parameters=plan.config.num_parameters,
            mixture={name: domain.weight for name, domain in sampled.items()},
            mixture_phases=samples.schedule.record(self.samples_at(self.step), plan.data.names),
            mixture_method=plan.mixture.method,
            domain_tokens=sampled,
            checkpoints=[str(path.relative_to(run_dir)) for path in checkpoint_folders(run_dir)],
            provenance=plan.provenance,
            cost=self._cost_before() + self.cost(),
            skipped_steps=self.state.guard.skipped,
            stopped_by=self.stopped_by,
            failed_saves=self.failed_saves,
            batch_layouts=self._batch_layouts(),
            order_version=samples.order_version,
            tokenizer=plan.data.tokenizer,
            target=plan.target.record if plan.target else None,
            best_step=best.step if best else None,
            best_target_loss=best.loss if best else None,
            limited=plan.limited or None,
        )
        try:
            run.save()
        except UserError as error:
            if status == "finished" or not TrainingRun.exists(run.root):
                raise
            warnings.warn(f"{error}; the previous record is kept", stacklevel=2)


def describe_shares(shares: Mapping[str, float]) -> str:
    """Format shares as 'news 0.750, code 0.250'."""
    return ", ".join(f"{name} {share:.3f}" for name, share in shares.items())


def format_duration(seconds: float) -> str:
    """Format seconds as '0:03:05' or '2 days, 0:03:05'."""
    return str(datetime.timedelta(seconds=round(seconds)))
