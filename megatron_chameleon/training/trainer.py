"""A training run: from options to a finished run on disk."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import torch

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.artifacts.training_run import Status
from megatron_chameleon.blend.boundaries import DocumentBoundaries
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.sampler import (
    Batch,
    check_batch_sizes,
    micro_batches,
    read_ahead,
    steps_between_changes,
)
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import Layout, distributed, from_main
from megatron_chameleon.training.checkpointing import (
    CheckpointWriter,
    check_same_samples,
    find_progress,
    resumed_schedule,
    roll_back,
    verify_files,
)
from megatron_chameleon.training.guard import SkippedStep, StepGuard, StepSync
from megatron_chameleon.training.hook import (
    HookFactory,
    HookRunner,
    TrainingHook,
    build_hook,
    load_hook,
)
from megatron_chameleon.training.memory import (
    check_host_memory,
    dry_first_step,
    explain_out_of_memory,
)
from megatron_chameleon.training.metrics import build_profiler
from megatron_chameleon.training.optimizer import build_trained_model
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import (
    TrainingPlan,
    plan_training,
    planned_epochs,
    warn_of_repeats,
)
from megatron_chameleon.training.records import Progress, RunRecords, format_duration
from megatron_chameleon.training.run_folder import locked_run_folder, on_main, starting_run
from megatron_chameleon.training.step import train_step
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.validation import build_validation


def pretrain(
    options: PretrainOptions,
    hook_factory: HookFactory | None = None,
    stops: StopRequests | None = None,
) -> None:
    """Train or resume the run described by ``options``. Collective: every rank calls it.

    Args:
        options: options of the run.
        hook_factory: constructs a method's training hook, if any.
        stops: stop-signal handler; created for this call if None.

    Raises:
        UserError: if the options or their input files are invalid, before anything is written or
            deleted; later, if too many consecutive steps are skipped.
    """
    with (
        contextlib.nullcontext(stops) if stops else StopRequests(options.stopping) as stops,
        deterministic_algorithms(options.deterministic),
        distributed(options.parallel, options.seed) as layout,
    ):
        plan = from_main(lambda: plan_training(options))
        check_batch_sizes(options.global_batch_size, options.micro_batch_size, layout.data_size)
        options.parallel.check_microbatches(
            options.global_batch_size // (options.micro_batch_size * layout.data_size)
        )
        check_host_memory(plan, layout)
        if options.corpus and options.data.verify_corpus:
            verify_files(Corpus.load(options.corpus), "the corpus", layout)
        samples = samples_of(plan, plan.schedule)
        with explain_out_of_memory():
            hook = build_hook(hook_factory, plan, layout)
        with on_main(locked_run_folder(options.run_dir)):
            progress = find_progress(plan, layout)
            schedule = resumed_schedule(plan, progress.checkpoint)
            if schedule != plan.schedule:  # a hook, or an earlier command, changed the mixture
                samples = samples_of(plan, schedule)
            if progress.checkpoint and progress.step >= options.train_iters:
                records = RunRecords(plan, layout, samples, progress)
                if progress.run and progress.run.status != "finished":  # killed before its record
                    skipped = progress.checkpoint.guard.get("skipped", 0)
                    records.write_run(progress.step, "finished", skipped)
                if layout.is_main:
                    print(f"{options.run_dir} is finished at step {progress.step}; nothing to do")
                return
            warn_of_repeats(plan, schedule)
            load_hook(hook, progress.checkpoint)
            Trainer(plan, layout, progress, samples, stops, hook).run()
    # Trainer, model and process groups form reference cycles. Collecting them frees memory for the
    # next model, and stops the polling threads of the gloo groups.
    gc.collect()


def samples_of(plan: TrainingPlan, schedule: MixtureSchedule) -> BlendedTokens:
    """The training samples of the whole run, in order."""
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
    """Training loop of one rank. Nothing is written or deleted before :meth:`run`."""

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
        self.plan, self.options, self.layout = plan, options, layout
        self.progress, self.samples, self.stops = progress, samples, stops
        if progress.checkpoint:
            check_same_samples(samples, progress.checkpoint)
        self.records = RunRecords(plan, layout, samples, progress, hook)
        self.meter, self.phases = self.records.meter, self.records.phases
        self.checkpoints = CheckpointWriter(self.records)
        self.batches: Iterator[Batch] = micro_batches(
            samples,
            options.global_batch_size,
            options.micro_batch_size,
            layout.data_rank,
            layout.data_size,
            start_step=progress.step,
        )
        self.mixture_interval = hook.mixture_interval if hook else 0
        with explain_out_of_memory():
            if hook:
                hook.prepare()
            self.model = build_trained_model(
                plan,
                layout,
                progress.checkpoint,
                combines_gradients=hook is not None and hook.combines_gradients,
            )
            self.hook = HookRunner(hook, self.model.passes, plan.shape, layout) if hook else None
            on_gpu = layout.device.type == "cuda"
            if options.dry_first_step == "on" or (options.dry_first_step == "auto" and on_gpu):
                dry_first_step(plan, layout, self.model)
        self.model.optimizer.accepts = self._accepts
        self.validation = build_validation(plan, self.model.passes, layout)
        self.profiler = build_profiler(options, layout, progress.step)
        self.sync = StepSync(layout)
        self.guard = StepGuard(options.guards, progress.guard)
        self.step = progress.step
        self.stop_reasons: list[str] = []
        self.save_is_due = False

    def run(self) -> None:
        """Train to the last step; run.json on disk tracks the progress."""
        signals = self.sync.signals(self.stops.flags())
        if signals:
            self._print(
                f"stopped by {', '.join(signals)} before step {self.step + 1} of "
                f"{self.options.train_iters}; run the same command again to resume"
            )
            return
        try:
            from_main(self._start)
            self._print(start_message(self.records))
            with self.profiler or contextlib.nullcontext():
                try:
                    self._train()
                except BaseException as error:
                    is_interrupted = isinstance(error, KeyboardInterrupt)
                    self.record("interrupted" if is_interrupted else "failed")
                    raise
        finally:
            self.records.close_loggers()
        self.record("interrupted" if self._stopped_by else "finished")
        self._print(self._end_message())

    def _start(self) -> None:
        """Prepare the run folder, on rank 0; nothing is written before."""
        with starting_run(self.options.run_dir, overwrite=self.options.overwrite):
            self.records.open_loggers()
            roll_back(self.progress, self.options.run_dir)
            self.record("running")

    def _train(self) -> None:
        """Run the remaining steps, or until all ranks agree to stop."""
        # Prefetch batches, but not across a step at which a hook may change the mixture.
        steps = steps_between_changes(self.step, self.options.train_iters, self.mixture_interval)
        chunks = [count * self.model.passes.shape.num_microbatches for count in steps]
        with (
            explain_out_of_memory(),
            read_ahead(self.batches, self.layout.device, chunks) as batches,
        ):
            self.batches = self.phases.timed(batches, "data")
            self.meter.restart_clock()
            while self.step < self.options.train_iters and not self.stop_reasons:
                self._run_step()
                self._log_and_save()
            if self.checkpoints.finish():
                self.record("running")

    def _run_step(self) -> None:
        """Read a batch, compute its gradient, and update the model unless the guard skips the step.

        Raises:
            UserError: if too many consecutive steps were skipped.
        """
        self.phases.start()
        model = self.model
        result = train_step(model.chunks, model.optimizer, model.scheduler, self._forward_backward)
        self.phases.lap("optimizer")
        self.step += 1
        if self.profiler:
            self.profiler.step()
        self.meter.add(result)
        self.stop_reasons = self.sync.stop_reasons()
        if not result.skipped:
            return
        assert self.guard.reason is not None
        skipped = SkippedStep(
            self.step,
            self.guard.reason,
            self.records.domain_samples(self.step),
            self.meter.domain_losses(result.domain_sums),
        )
        self._print(str(skipped))
        if self.hook:
            self.hook.undo_step()
        if self.guard.record(skipped, is_last_step=self._is_last):
            self._write_log(validate=False)
            self.checkpoints.finish()
            first = self.guard.streak[0]
            raise UserError(
                f"{len(self.guard.streak)} steps in a row were skipped, {first} to {self.step}; "
                f"{skipped}; last checkpoint before them: "
                f"{self.records.last_checkpoint(before_step=first) or 'none'}; start a new run "
                "with a lower --lr, a longer --lr-warmup-iters, or without the text of these "
                "domains (--mixture)"
            )

    def _forward_backward(self) -> torch.Tensor:
        """Run a step's passes, then start the all-reduce of loss and stop flags."""
        if self.hook:
            batch_size = self.options.global_batch_size
            if self.hook.change_mixture(self.step, self.samples, batch_size):
                self.phases.lap("mixture")
            sums = self.hook.forward_backward(self.batches, self.step, self.model.lr)
        else:
            sums = self.model.passes.forward_backward(self.batches)
        self.phases.lap("forward_backward")
        self.sync.send(sums, self.stops.flags())
        return sums

    def _accepts(self, grad_norm: float) -> bool:
        """Whether the step may update the model; called by the optimizer with the norm."""
        schedule = self.samples.schedule
        phase = schedule.phases[schedule.phase_at(self.records.samples_at(self.step))]
        return self.guard.accepts(self.sync.loss(), grad_norm, phase.first_sample)

    def _log_and_save(self) -> None:
        """Log, validate and save where this step is due.

        No checkpoint is written during a streak of skipped steps, so that the one before the streak
        is kept. The exception is the run's last checkpoint, which deletes no other.
        """
        self.save_is_due |= self.step % self.options.save_interval == 0
        leaving = self._is_last or bool(self.stop_reasons)
        save = (leaving and self.guard.updates > 0) or (self.save_is_due and not self.guard.streak)
        validate = self.validation is not None and (
            self.step % self.options.validation.eval_interval == 0
            or (self._is_last and self.options.validation.eval_last_step)
        )
        if save or leaving or validate or self.step % self.options.log_interval == 0:
            self._write_log(validate=validate)
        if save:
            with self.phases.during("saving"):
                hook = self.hook.state() if self.hook else None
                record = self.records.checkpoint(self.step, self.guard.state(), hook)
                self.checkpoints.save(self.model.state(), record, is_last=leaving)
                self.record("running")
            self.save_is_due = False
            self.meter.restart_clock()
        elif self.checkpoints.finish(blocking=False):
            self.record("running")

    def _write_log(self, *, validate: bool) -> None:
        interval = self.records.read_meter(self.step)
        losses: dict[str, float] = {}
        if validate and self.validation:
            with self.phases.during("validation"):
                losses = self.validation.losses()
            self.records.validation_flops += self.validation.flops(self.plan.shape)
        self.records.log(self.step, interval, self.model.lr, self.guard, losses)

    def record(self, status: Status) -> None:
        """Update run.json, on rank 0."""
        self.records.write_run(self.step, status, self.guard.skipped, self._stopped_by)

    @property
    def _is_last(self) -> bool:
        return self.step == self.options.train_iters

    @property
    def _stopped_by(self) -> str | None:
        """Why the run stops before its last step, if it does."""
        return None if self._is_last else ", ".join(self.stop_reasons) or None

    def _print(self, message: str) -> None:
        if self.layout.is_main:
            print(message)

    def _end_message(self) -> str:
        """Tokens and cost so far, and the next command to run."""
        options, cost = self.options, self.records.cost(self.step)
        lines = [
            f"trained to step {self.step} in {format_duration(cost.wall_seconds)}, "
            f"{cost.flops:.2e} FLOPs",
            *(
                f"  {name}: {tokens.actual:,} tokens sampled (target {tokens.target:,.0f}), "
                f"{tokens.epochs:.2f} epochs"
                for name, tokens in self.records.sampled().items()
            ),
            f"checkpoint: {step_folder(options.run_dir, self.step)}"
            if self.guard.updates
            else f"no checkpoint: none of the {self.step} steps has updated the model",
            f"stopped by {self._stopped_by} at step {self.step} of {options.train_iters}; "
            "run the same command again to resume"
            if self._stopped_by
            else "next: tools/compute_mixture.py or tools/evaluate.py perplexity, with "
            f"--corpus {options.corpus or 'CORPUS'} --checkpoint {options.run_dir}",
        ]
        return "\n".join(lines)


def start_message(records: RunRecords) -> str:
    """What is trained, and with which mixture."""
    plan, layout, step = records.plan, records.layout, records.first_step
    options, size, schedule = plan.options, plan.shape.size, records.samples.schedule
    name = options.model_size or f"{size.num_layers} layers of width {size.hidden_size}"
    epochs = planned_epochs(plan.data, schedule, plan.num_samples, options.seq_length)
    weights = (
        f"{name} {domain.weight:.3f} ({epochs[name]:.2f} epochs)"
        for name, domain in records.sampled().items()
    )
    phases = [
        f"from step {phase.first_sample // options.global_batch_size}: "
        + ", ".join(f"{n} {w:.3f}" for n, w in zip(plan.data.names, phase.weights, strict=True))
        for phase in schedule.phases
        if phase.first_sample >= max(records.samples_at(step), 1)
    ]
    lines = [
        f"{f'resuming at step {step}' if step else 'training'}: {name}, "
        f"{plan.shape.num_parameters:,} parameters, "
        f"{options.train_iters} steps of {plan.tokens_per_step:,} tokens on "
        f"{layout.world_size} x {layout.describe()['device']} (tensor {layout.tensor_size}, "
        f"pipeline {layout.pipeline_size}, data {layout.data_size})",
        *(
            [f"initial weights: {plan.pretrained.where}", *plan.pretrained.left_out]
            if plan.pretrained and not step
            else []
        ),
        f"mixture {plan.mixture.method}: {', '.join(weights)}",
        *phases,
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Restrict torch to deterministic algorithms within the block, if ``enabled``.

    scaled_dot_product_attention then skips its nondeterministic backends, and operations without a
    deterministic implementation raise RuntimeError. Enter it before CUDA is initialized: cuBLAS and
    NCCL read their environment variables once. Variables that the user has set are kept. See
    torch.use_deterministic_algorithms.
    """
    if not enabled:
        yield
        return
    # The larger of the two workspaces that make cuBLAS deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Reduces in a fixed order. By default, NCCL may choose another algorithm in each run.
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's
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
