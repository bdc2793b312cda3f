"""Train or resume a run that is described by its options."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Iterator
from functools import partial

import torch

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.checkpoint import BestTarget
from megatron_chameleon.blend.sampler import read_ahead, require_embeddings, steps_between_changes
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import distributed, from_main, seed_dropout
from megatron_chameleon.training.checkpointing import (
    CheckpointWriter,
    check_same_samples,
    find_progress,
    resumed_schedule,
    roll_back,
    verify_files,
)
from megatron_chameleon.training.guard import SkippedStep, StepSync
from megatron_chameleon.training.hook import (
    HookFactory,
    HookRunner,
    build_hook,
    load_hook,
)
from megatron_chameleon.training.metrics import PhaseTimers, build_profiler, mean_losses
from megatron_chameleon.training.optimizer import build_trained_model
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.out_of_memory import (
    check_host_memory,
    dry_first_step,
    explain_out_of_memory,
)
from megatron_chameleon.training.plan import plan_training, warn_of_repeats
from megatron_chameleon.training.records import RunRecords
from megatron_chameleon.training.reload import ReloadedMixture
from megatron_chameleon.training.run_folder import locked_run_folder, on_main, starting_run
from megatron_chameleon.training.step import BatchShape, StepResult
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.validation import build_validation


def pretrain(
    options: PretrainOptions,
    hook_factory: HookFactory | None = None,
    stops: StopRequests | None = None,
) -> None:
    """Train or resume the run described by ``options``. Collective.

    Args:
        options: options of the run.
        hook_factory: constructs a method's training hook, if any; excludes --reload-mixture.
        stops: stop-signal handler; created for this call if None.

    Raises:
        UserError: if the options or the input files are invalid (raised before anything is written
            or deleted), or if too many consecutive steps are skipped.
    """
    with (
        explain_out_of_memory(),
        contextlib.nullcontext(stops) if stops else StopRequests(options.stopping) as stops,
        deterministic_algorithms(options.deterministic),
        distributed(options.parallel, options.seed) as layout,
    ):
        plan = from_main(lambda: plan_training(options))
        BatchShape.of(options, layout.data_size)  # raises if the ranks cannot share the batch
        check_host_memory(plan, layout)
        if options.corpus and options.data.verify_corpus:
            corpus = from_main(partial(Corpus.load, options.corpus))
            verify_files(corpus, "the corpus", layout)
        if options.reload.reload_mixture is not None:
            hook_factory = hook_factory or ReloadedMixture
        hook = build_hook(hook_factory, plan, layout)
        with on_main(locked_run_folder(options.run_dir)):
            progress = find_progress(plan, layout)
            samples = plan.samples(resumed_schedule(plan, progress.checkpoint))
            from_main(samples.open)  # the other ranks open a domain when they first read it
            records = RunRecords(plan, layout, samples, progress, hook)
            if progress.checkpoint and records.is_done:
                # An earlier process was killed after it wrote its last checkpoint, but before it
                # updated run.json.
                if progress.run and progress.run.status != "finished":
                    records.write_run("finished")
                records.print(
                    f"{options.run_dir} is finished at step {progress.step}; nothing to do"
                )
                return
            warn_of_repeats(options, plan.data, plan.mixture, samples.schedule)
            if progress.checkpoint:
                check_same_samples(samples, progress.checkpoint)
            load_hook(hook, progress.checkpoint)
            Trainer(records, stops).run()
    # Trainer, model and process groups form reference cycles. Collecting them frees memory for the
    # next model, and stops the polling threads of the gloo groups.
    gc.collect()


class Trainer:
    """Training loop of one rank. Nothing is written or deleted before :meth:`run`."""

    def __init__(self, records: RunRecords, stops: StopRequests) -> None:
        plan, layout, options = records.plan, records.layout, records.plan.options
        progress, state, hook = records.progress, records.state, records.state.hook
        self.records, self.stops, self.options = records, stops, options
        self.samples, self.guard, self.meter = state.samples, state.guard, state.meter
        self.phases = PhaseTimers(layout.device)
        self.checkpoints = CheckpointWriter(records)
        hook.prepare()
        self.model = build_trained_model(
            plan, layout, progress.checkpoint, combines_gradients=hook.combines_gradients
        )
        self.hook = HookRunner(hook, self.model.passes, plan.config, layout)
        shape = self.model.passes.shape
        self.batches = require_embeddings(
            shape.micro_batches(self.samples, layout, progress.step),
            self.model.passes.num_embeddings,
            plan.data.names,
        )
        # Prefetch batches, but not across a step at which a hook may change the mixture.
        steps = steps_between_changes(progress.step, options.train_iters, hook.mixture_interval)
        self.prefetched = [count * shape.num_microbatches for count in steps]
        on_gpu = layout.device.type == "cuda"
        if options.dry_first_step == "on" or (options.dry_first_step == "auto" and on_gpu):
            dry_first_step(plan, layout, self.model)
        self.validation = build_validation(plan, self.model.passes, layout)
        self.profiler = build_profiler(options, layout, progress.step)
        self.sync = StepSync(layout, len(plan.data.names))
        self.save_is_due = False

    def run(self) -> None:
        """Train to the last step; run.json records the progress."""
        records = self.records
        signals = self.sync.signals(self.stops.flags())
        if signals:
            records.print(
                f"stopped by {', '.join(signals)} before step {records.step + 1} of "
                f"{self.options.train_iters}; run the same command again to resume"
            )
            return
        try:
            from_main(self._start)
            records.print(records.start_message())
            with self.profiler or contextlib.nullcontext():
                try:
                    self._train()
                except BaseException as error:
                    is_interrupted = isinstance(error, KeyboardInterrupt)
                    records.write_run("interrupted" if is_interrupted else "failed")
                    raise
        finally:
            records.close_loggers()
        records.write_run("interrupted" if records.stopped_by else "finished")
        records.print(records.end_message())

    def _start(self) -> None:
        """Make the first writes to the run folder, on rank 0."""
        with starting_run(self.options.run_dir, overwrite=self.options.overwrite):
            self.records.open_loggers()
            roll_back(self.records.progress, self.options.run_dir)
            self.records.write_run("running")

    def _train(self) -> None:
        """Run the remaining steps; end earlier if all ranks agree to stop."""
        records, device = self.records, self.records.layout.device
        with read_ahead(self.batches, device, self.prefetched) as batches:
            if self.validation and self.options.validation.eval_first_step and not records.step:
                records.log_first(*self._validate())
            self.batches = self.phases.timed(batches, "data")
            self.meter.restart_clock()
            while not (records.is_done or records.stopped_by):
                self.run_step()
                self._log_and_save()
            self.checkpoints.finish()

    def run_step(self) -> None:
        """Train on the next global batch; the guard may skip the update of the model.

        Raises:
            UserError: if too many consecutive steps were skipped.
        """
        records, options, model = self.records, self.options, self.model
        samples, step = self.samples, records.step
        self.phases.start()
        model.zero_gradients()
        # The schedule advances before the update, so that the first step does not run at rate 0. It
        # also advances before the passes, because a hook may need the learning rate of the update.
        model.scheduler.step(1)
        if self.hook.change_mixture(step, samples, options.global_batch_size):
            self.phases.lap("mixture")
        if options.hidden_dropout or options.attention_dropout:
            seed_dropout(records.layout, options.seed, step)
        domain_sums = self.hook.forward_backward(self.batches, step, model.lr)
        self.phases.lap("forward_backward")

        self.sync.send(domain_sums, self.stops.flags())
        model.optimizer.prepare_grads()
        # The host waits for the device here only; the results of ``sync`` have then arrived, too.
        grad_norm = model.optimizer.get_grad_norm()
        phase = samples.schedule.phases[samples.schedule.phase_at(records.samples_at(step))]
        reason = self.guard.check(self.sync.loss(), grad_norm, phase.first_sample)
        if reason is None:
            model.clip_gradients(grad_norm)
            model.optimizer.step_with_ready_grads()
        self.phases.lap("optimizer")

        records.add(StepResult(domain_sums, grad_norm, reason))
        if self.profiler:
            self.profiler.step()
        if not records.is_done:
            records.stopped_by = ", ".join(self.sync.stop_reasons()) or None
        if reason is None:
            self.hook.end_step(records.step, self.sync.domain_losses())
        else:
            self._record_skipped(reason)

    def _record_skipped(self, reason: str) -> None:
        """Report a skipped step, and undo the changes that it made to the hook's state.

        Raises:
            UserError: if too many consecutive steps were skipped.
        """
        records = self.records
        losses = mean_losses(records.plan.data.names, *self.sync.domain_losses().tolist())
        skipped = SkippedStep(records.step, reason, records.domain_samples(), losses)
        records.print(str(skipped))
        self.hook.undo_step()
        if self.guard.record(skipped, is_last_step=records.is_done):
            self._write_log(validate=False)
            self.checkpoints.finish()
            first = self.guard.streak[0]
            raise UserError(
                f"{len(self.guard.streak)} steps in a row were skipped, {first} to "
                f"{records.step}; {skipped}; last checkpoint before these steps: "
                f"{records.last_checkpoint(before_step=first) or 'none'}; start a new run "
                "with a lower --lr, a longer --lr-warmup-iters, or without the text of these "
                "domains (--mixture)"
            )

    def _log_and_save(self) -> None:
        """Log, validate and save if they are due after this step.

        No checkpoint is written during a streak of skipped steps, so that the checkpoint before the
        streak is kept. The exception is the run's last checkpoint, which does not delete other
        checkpoints.
        """
        records, options, step = self.records, self.options, self.records.step
        kept = options.checkpointing.keep_steps
        self.save_is_due |= step % options.save_interval == 0 or step in kept
        leaving = records.is_done or records.stopped_by is not None
        save = (leaving and self.guard.updates > 0) or (self.save_is_due and not self.guard.streak)
        validate = self.validation is not None and (
            step % options.validation.eval_interval == 0
            or (records.is_done and options.validation.eval_last_step)
        )
        target_loss = None
        if save or leaving or validate or step % options.log_interval == 0:
            target_loss = self._write_log(validate=validate)
        new_best = None
        if target_loss is not None and not self.guard.streak:
            new_best = self._new_best(target_loss)
            save |= new_best is not None and options.target.keep_best
        if save:
            with self.phases.during("saving"):
                self.checkpoints.finish()  # its checkpoint may have the lowest target loss
                best = new_best or records.state.best
                self.checkpoints.save(self.model.state(), best, is_last=leaving)
            self.save_is_due = False
            self.meter.restart_clock()
        else:
            self.checkpoints.finish(blocking=False)

    def _new_best(self, target_loss: float) -> BestTarget | None:
        """Return the target loss after this step if it is the lowest one so far.

        With --keep-best, it replaces ``state.best`` when the checkpoint is complete.
        """
        records, state = self.records, self.records.state
        with self.phases.during("saving"):
            self.checkpoints.finish()  # its checkpoint may have the lowest target loss
        if not target_loss < (state.best.loss if state.best else math.inf):
            return None
        best = BestTarget(records.step, target_loss, records.plan.target_hash)
        if not self.options.target.keep_best:
            state.best = best
        return best

    def _write_log(self, *, validate: bool) -> float | None:
        """Log the steps since the last log; return the target's loss if it was measured."""
        interval = self.meter.read()
        losses, target_loss = self._validate() if validate else ({}, None)
        self.records.log(interval, self.model.lr, losses, target_loss, self.phases)
        return target_loss

    def _validate(self) -> tuple[dict[str, float], float | None]:
        """Measure the validation losses by name, and the loss of the target, if there is one."""
        assert self.validation is not None
        with self.phases.during("validation"):
            losses = self.validation.losses()
        self.records.validation_flops += self.validation.flops(self.records.plan.config)
        target = self.records.plan.target
        return losses, target.record.loss_of(losses) if target else None


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Restrict torch to deterministic algorithms within the block, if ``enabled``.

    scaled_dot_product_attention then skips its nondeterministic backends, and operations without a
    deterministic implementation raise RuntimeError. Enter the block before CUDA is initialized,
    because cuBLAS and NCCL read their environment variables only once. Environment variables that
    the user has set are kept. See torch.use_deterministic_algorithms.
    """
    if not enabled:
        yield
        return
    # This is the larger of the two workspace settings for which cuBLAS is deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Rings reduce in a fixed order. By default, NCCL may choose another algorithm in each run.
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # read by Transformer Engine
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    # Nothing here reads uninitialized memory, so filling every new tensor would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
