"""The training loop: from a plan to a finished run on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.training_run import Status
from megatron_chameleon.blend.boundaries import DocumentBoundaries
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.sampler import Batch, MicroBatchIterator, check_batch_sizes
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.model.memory_advice import describe_out_of_memory
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.parallel.layout import (
    Layout,
    check_interleaving,
    distributed,
    from_main,
)
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.training.agreement import StepAgreement
from megatron_chameleon.training.announcements import announce, say_finished, say_stopped
from megatron_chameleon.training.checkpointing import Checkpointing
from megatron_chameleon.training.determinism import deterministic_algorithms
from megatron_chameleon.training.guards import StepGuard
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.plan import TrainingPlan, plan_training, warn_of_repeats
from megatron_chameleon.training.prefetch import read_ahead
from megatron_chameleon.training.profiling import StepProfiler
from megatron_chameleon.training.records import RunRecords
from megatron_chameleon.training.resume import (
    Progress,
    check_same_samples,
    find_progress,
    resumed_schedule,
)
from megatron_chameleon.training.run_log import RunLog, Standing
from megatron_chameleon.training.say import say
from megatron_chameleon.training.skipped import SkippedStep, streak_message
from megatron_chameleon.training.step import StepResult, train_step
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.trained_model import build_trained_model
from megatron_chameleon.training.validation import open_validation
from megatron_chameleon.training.watch import MakeHook, Watch, make_hook


def pretrain(options: PretrainOptions, watched_by: MakeHook | None = None) -> None:
    """Train, or go on training, what ``options`` describe. Every rank calls this.

    Args:
        options: of the run.
        watched_by: makes the hook of a method that watches the run, if one does.

    Raises:
        UserError: for a mistake in the options or in what they name, before anything is written or
            deleted; later, if too many steps in a row have to be skipped.
    """
    stops = StopRequests(options.stopping)
    with (
        deterministic_algorithms(options.deterministic),
        distributed(options.parallel, options.seed) as layout,
    ):
        plan = from_main(lambda: plan_training(options))
        check_batch_sizes(options.global_batch_size, options.micro_batch_size, layout.data_size)
        check_interleaving(
            options.parallel,
            options.global_batch_size // (options.micro_batch_size * layout.data_size),
        )
        if options.data.verify_corpus:
            verify_corpus(options, layout)
        samples = samples_of(plan, plan.schedule)
        progress = find_progress(plan, layout)
        if progress.step >= options.train_iters:
            if layout.is_main:
                print(f"{options.run_dir} is finished at step {progress.step}; nothing to do")
            return
        schedule = resumed_schedule(plan, progress.checkpoint)
        if schedule != plan.schedule:  # weights have changed in ways that the options do not say
            samples = samples_of(plan, schedule)
        warn_of_repeats(plan, schedule)
        hook = make_hook(watched_by, plan, layout, progress)
        Trainer(plan, layout, progress, samples, stops, hook).run()


def verify_corpus(options: PretrainOptions, layout: Layout) -> None:
    """Compare the hashes of the corpus's token files; the ranks share the work.

    Raises:
        UserError: on the rank that finds a file which is not what it was.
    """
    assert options.corpus is not None
    corpus = Corpus.load(options.corpus)
    total = corpus.share_bytes(layout.rank, layout.world_size)
    with progress_bar(total, "B", "verifying the corpus", quiet=not layout.is_main) as bar:
        corpus.verify(layout.rank, layout.world_size, bar.update)


def samples_of(plan: TrainingPlan, schedule: MixtureSchedule) -> BlendedTokens:
    """The training samples of the whole run, in their order."""
    options = plan.options
    return BlendedTokens(
        data=plan.data,
        schedule=schedule,
        num_samples=plan.num_samples,
        seq_length=options.seq_length,
        seed=options.seed,
        permutation=options.data.permutation,
        boundaries=DocumentBoundaries(plan.data.tokenizer.eod_id, options.boundaries),
        cache=options.data.data_cache_path,
        by_size=plan.by_size,
    )


class Trainer:
    """One rank's side of a training run."""

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
        self.hook = hook
        if progress.checkpoint:
            check_same_samples(samples, progress.checkpoint)
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
        self.model = build_trained_model(plan, layout, progress, hook)
        self.watch = Watch(hook, self.model.passes, self.records) if hook else None
        self.model.optimizer.accepts = self._judge
        self.validation = open_validation(plan, self.model.passes, layout)
        self.profiler = StepProfiler(options.profiling, options.run_dir, layout)
        self.guard = StepGuard(options.guards, progress.guard)
        self.agreement = StepAgreement(layout)
        self.objection: str | None = None
        self.streak: list[SkippedStep] = []
        self.skipped_since_log: list[SkippedStep] = []
        self.stop_reasons: list[str] = []
        self.save_is_due = False
        self.step = progress.step

    def run(self) -> None:
        """Train to the last step; a run.json on disk says at any time how far it came."""
        self.record("running")
        announce(self.records)
        try:
            with self.stops, self._batches_ahead() as batches:
                self.batches = self.log.phases.timed(batches, "data")
                self._run_steps()
        except KeyboardInterrupt:
            self.record("interrupted")
            raise
        except torch.OutOfMemoryError as error:
            self.record("failed")
            advice = describe_out_of_memory(self.options, self.plan.shape, self.layout)
            raise UserError(advice) from error
        except Exception:
            self.record("failed")
            raise
        finally:
            self.profiler.finish(self.step)
            self.log.close()
        self._leave()

    def _run_steps(self) -> None:
        """The steps that are left, or those until all ranks have agreed to stop."""
        self.log.open()
        while self.step < self.options.train_iters and not self.stop_reasons:
            self._run_step()
            self._log_and_save()
        if self.checkpoints.wait():
            self.record("running")

    def _batches_ahead(self) -> contextlib.AbstractContextManager[Iterator[Batch]]:
        """None are read ahead where the mixture may change before they are trained on."""
        if self.hook and self.hook.mixture_interval:
            return contextlib.nullcontext(self.batches)
        return read_ahead(self.batches, self.layout.device)

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
        if not result.skipped:
            self.streak = []
            return
        self._note_skipped(result)
        if self.guard.gives_up or (self._is_last and not self.guard.updates):
            self._write_log(validate=False)
            self.checkpoints.wait()
            raise UserError(streak_message(self.streak, self.records.last_checkpoint()))

    def _forward_backward(self) -> torch.Tensor:
        """The passes of a step; what the ranks have to agree on then goes its way."""
        if self.watch:
            sums = self.watch.forward_backward(self.batches, self.step)
        else:
            sums = self.model.passes.forward_backward(self.batches)
        self.log.phases.lap("forward_backward")
        self.agreement.send(sums, self.stops.flags())
        return sums

    def _judge(self, grad_norm: float) -> bool:
        """Whether the step may update the model; the optimizer asks, with the norm in its hands."""
        self.objection = self.guard.judge(self.agreement.loss(), grad_norm)
        return self.objection is None

    def _note_skipped(self, result: StepResult) -> None:
        assert self.objection is not None
        step = SkippedStep(
            self.step,
            self.objection,
            self.records.domain_samples(self.step),
            self.log.meter.domain_losses(result.domain_sums),
        )
        self.streak.append(step)
        self.skipped_since_log.append(step)
        if self.layout.is_main:
            say(step.line())

    def _log_and_save(self) -> None:
        """Log, validate and save where the step asks for it.

        No checkpoint is written among skipped steps, so that there is one from before them.
        """
        self.save_is_due |= self.step % self.options.save_interval == 0
        leaving = self._is_last or bool(self.stop_reasons)
        save = (leaving and self.guard.updates > 0) or (self.save_is_due and not self.streak)
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
            options, tokens = self.options, self.validation.num_tokens
            self.records.extra_flops += forward_flops(self.plan.shape, tokens, options.seq_length)
        standing = Standing(
            self.step,
            self.model.lr,
            self.guard.skipped,
            self.skipped_since_log,
            losses,
            self.watch.metrics() if self.watch else None,
        )
        self.log.write(interval, standing)
        self.skipped_since_log = []

    def _save(self, *, is_last: bool) -> None:
        """Write a checkpoint, or begin to, and bring run.json up to date."""
        with self.log.phases.during("saving"):
            hook = self.watch.state() if self.watch else None
            record = self.records.checkpoint(self.step, self.guard.state(), hook)
            self.checkpoints.save(self.model.state(), record, is_last=is_last)
            self.record("running")
        self.save_is_due = False
        self.log.meter.restart_clock()

    def record(self, status: Status) -> None:
        """Bring run.json up to date, on rank 0."""
        self.records.write_run(self.step, status, self.guard.skipped, self._stopped_by)

    def _leave(self) -> None:
        if self._stopped_by is None:
            self.record("finished")
            say_finished(self.records, self.step)
            return
        self.record("interrupted")
        say_stopped(self.records, self.step, self._stopped_by, saved=self.guard.updates > 0)

    @property
    def _is_last(self) -> bool:
        return self.step == self.options.train_iters

    @property
    def _stopped_by(self) -> str | None:
        """Why the run leaves before its last step, if it does."""
        return None if self._is_last else ", ".join(self.stop_reasons) or None
