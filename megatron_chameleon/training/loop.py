"""The training loop: one rank's side of a run, its steps and what is written down of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron_chameleon.artifacts.training_run import Status
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.prefetch import read_ahead, steps_between_changes
from megatron_chameleon.blend.sampler import Batch, MicroBatchIterator
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.agreement import StepAgreement
from megatron_chameleon.training.announcements import (
    announce,
    say_finished,
    say_not_begun,
    say_stopped,
)
from megatron_chameleon.training.checkpointing import Checkpointing
from megatron_chameleon.training.dry_step import dry_first_step, is_wanted, told_out_of_memory
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.profiling import StepProfiler
from megatron_chameleon.training.records import RunRecords
from megatron_chameleon.training.resume import Progress, check_same_samples, go_back
from megatron_chameleon.training.run_folder import beginning
from megatron_chameleon.training.run_log import RunLog, Standing
from megatron_chameleon.training.skipped_steps import SkippedSteps
from megatron_chameleon.training.step import train_step
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.trained_model import build_trained_model
from megatron_chameleon.training.validation import open_validation
from megatron_chameleon.training.watch import Watch


class Trainer:
    """One rank's side of a training run. Nothing is written or deleted before it runs."""

    def __init__(
        self,
        plan: TrainingPlan,
        layout: Layout,
        progress: Progress,
        samples: BlendedTokens,
        stops: StopRequests,
        hook: TrainingHook | None,
    ) -> None:
        options = plan.options
        self.plan, self.options, self.layout, self.stops = plan, options, layout, stops
        self.hook, self.progress = hook, progress
        if progress.checkpoint:
            check_same_samples(samples, progress.checkpoint, plan.way_out)
        self.records = RunRecords(plan, layout, samples, progress)
        self.log = RunLog(self.records)
        self.checkpoints = Checkpointing(self.records)
        self.batches: Iterator[Batch] = MicroBatchIterator(
            samples,
            options.global_batch_size,
            options.micro_batch_size,
            layout.data_rank,
            layout.data_size,
            start_step=progress.step,
        )
        with told_out_of_memory(plan, layout, hook):
            if hook:
                hook.prepare()
            self.model = build_trained_model(plan, layout, progress, hook)
            self.watch = Watch(hook, self.model.passes, self.records) if hook else None
            if is_wanted(options.dry_first_step, layout.device):
                dry_first_step(plan, layout, self.model)
        self.model.optimizer.accepts = self._judge
        self.validation = open_validation(plan, self.model.passes, layout)
        self.profiler = StepProfiler(options.profiling, options.run_dir, layout)
        self.agreement = StepAgreement(layout)
        self.skipped = SkippedSteps(
            self.records,
            self.log.meter,
            progress.guard,
            hook_mixes=bool(hook and hook.mixture_interval),
        )
        self.stop_reasons: list[str] = []
        self.save_is_due = False
        self.step = progress.step

    def run(self) -> None:
        """Train to the last step; a run.json on disk says at any time how far it came."""
        asked = self.agreement.signals(self.stops.flags())
        if asked:
            say_not_begun(self.records, ", ".join(asked))
            return
        with contextlib.ExitStack() as closing:  # each is closed, whatever becomes of the other
            closing.callback(self.log.close)
            self._begin()
            closing.callback(lambda: self.profiler.finish(self.step))
            self._train()
        self._leave()

    def _begin(self) -> None:
        """Write the first record. What an old run leaves is cut back, or replaced, by then."""
        with beginning(self.options.run_dir, overwrite=self.options.overwrite):
            self.log.open()
            go_back(self.progress, self.options.run_dir)
            self.record("running")
        announce(self.records)

    def _train(self) -> None:
        """Take the steps that are left; what ends them early is recorded."""
        try:
            memory = told_out_of_memory(self.plan, self.layout, self.hook)
            with memory, self._batches_ahead() as batches:
                self.batches = self.log.phases.timed(batches, "data")
                self._run_steps()
        except KeyboardInterrupt:
            self.record("interrupted")
            raise
        except Exception:
            self.record("failed")
            raise

    def _run_steps(self) -> None:
        """The steps that are left, or those until all ranks have agreed to stop."""
        self.log.meter.restart_clock()
        while self.step < self.options.train_iters and not self.stop_reasons:
            self._run_step()
            self._log_and_save()
        if self.checkpoints.wait():
            self.record("running")

    def _batches_ahead(self) -> contextlib.AbstractContextManager[Iterator[Batch]]:
        """Read ahead, but not across a step before which a hook may change the mixture."""
        interval = self.hook.mixture_interval if self.hook else 0
        steps = steps_between_changes(self.step, self.options.train_iters, interval)
        parts = [count * self.model.passes.shape.num_microbatches for count in steps]
        return read_ahead(self.batches, self.layout.device, parts)

    def _run_step(self) -> None:
        """One step, which the guard may skip.

        Raises:
            UserError: if too many in a row were skipped.
        """
        self.profiler.before_step(self.step)
        self.log.phases.start()
        model = self.model
        result = train_step(model.chunks, model.optimizer, model.scheduler, self._forward_backward)
        self.log.phases.lap("optimizer")
        self.step += 1
        self.profiler.after_step(self.step)
        self.log.meter.add(result)
        self.stop_reasons = self.agreement.stop_reasons()
        self.skipped.note(self.step, result)
        if result.skipped and self.watch:
            self.watch.take_back()
        if self.skipped.too_many(is_last=self._is_last):
            self._write_log(validate=False)
            self.checkpoints.wait()
            raise self.skipped.error()

    def _forward_backward(self) -> torch.Tensor:
        """The passes of a step; what the ranks have to agree on then goes its way."""
        if self.watch:
            if self.watch.change_mixture(self.step):
                self.log.phases.lap("mixture")
            sums = self.watch.forward_backward(self.batches, self.step, self.model.lr)
        else:
            sums = self.model.passes.forward_backward(self.batches)
        self.log.phases.lap("forward_backward")
        self.agreement.send(sums, self.stops.flags())
        return sums

    def _judge(self, grad_norm: float) -> bool:
        """Whether the step may update the model; the optimizer asks, with the norm in its hands."""
        return self.skipped.accepts(self.step, self.agreement.loss(), grad_norm)

    def _log_and_save(self) -> None:
        """Log, validate and save where the step asks for it.

        No checkpoint is written among skipped steps, so that there is one from before them; but for
        the one that the run leaves with, which replaces none.
        """
        self.save_is_due |= self.step % self.options.save_interval == 0
        leaving = self._is_last or bool(self.stop_reasons)
        save = (leaving and self.skipped.updates > 0) or (
            self.save_is_due and not self.skipped.streak
        )
        validate = self.validation is not None and (
            self.step % self.options.validation.eval_interval == 0
        )
        if save or leaving or validate or self.step % self.options.log_interval == 0:
            self._write_log(validate=validate)
        if save:
            self._save(is_last=leaving)
        elif self.checkpoints.poll():
            self.record("running")

    def _write_log(self, *, validate: bool) -> None:
        interval = self.log.read(self.step)
        losses: dict[str, float] = {}
        if validate and self.validation:
            with self.log.phases.during("validation"):
                losses = self.validation.losses()
            self.records.extra_flops += self.validation.flops(self.plan.shape)
        standing = Standing(
            self.step,
            self.model.lr,
            self.skipped.count,
            self.skipped.since_log(),
            losses,
            self.watch.metrics() if self.watch else None,
        )
        self.log.write(interval, standing)

    def _save(self, *, is_last: bool) -> None:
        """Write a checkpoint, or begin to, and bring run.json up to date."""
        with self.log.phases.during("saving"):
            hook = self.watch.state() if self.watch else None
            record = self.records.checkpoint(self.step, self.skipped.state(), hook)
            self.checkpoints.save(self.model.state(), record, is_last=is_last)
            self.record("running")
        self.save_is_due = False
        self.log.meter.restart_clock()

    def record(self, status: Status) -> None:
        """Bring run.json up to date, on rank 0."""
        self.records.write_run(self.step, status, self.skipped.count, self._stopped_by)

    def _leave(self) -> None:
        if self._stopped_by is None:
            self.record("finished")
            say_finished(self.records, self.step)
            return
        self.record("interrupted")
        say_stopped(self.records, self.step, self._stopped_by, saved=self.skipped.updates > 0)

    @property
    def _is_last(self) -> bool:
        return self.step == self.options.train_iters

    @property
    def _stopped_by(self) -> str | None:
        """Why the run leaves before its last step, if it does."""
        return None if self._is_last else ", ".join(self.stop_reasons) or None
