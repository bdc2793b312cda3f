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
from megatron_chameleon.blend.prefetch import read_ahead, steps_between_changes
from megatron_chameleon.blend.sampler import Batch, check_batch_sizes, micro_batches
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.parallel.layout import Layout, distributed, from_main, on_every_rank
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.training.checkpointing import (
    CheckpointWriter,
    Progress,
    check_same_samples,
    find_progress,
    go_back,
    resumed_schedule,
)
from megatron_chameleon.training.guard import SkippedSteps, StepSync
from megatron_chameleon.training.hook import (
    HookFactory,
    HookRunner,
    TrainingHook,
    build_hook,
    load_hook,
)
from megatron_chameleon.training.loggers import LogState, RunLog
from megatron_chameleon.training.memory import (
    check_host_memory,
    dry_first_step,
    explain_out_of_memory,
    wants_dry_step,
)
from megatron_chameleon.training.metrics import duration
from megatron_chameleon.training.optimizer import build_trained_model
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import (
    TrainingPlan,
    plan_training,
    planned_epochs,
    warn_of_repeats,
)
from megatron_chameleon.training.profiling import StepProfiler
from megatron_chameleon.training.records import RunRecords, sampled_lines
from megatron_chameleon.training.run_folder import locked_run_folder, starting_run
from megatron_chameleon.training.step import train_step
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.validation import open_validation

# Of the two values that make cuBLAS deterministic, the one with the larger workspace.
CUBLAS_WORKSPACE = ":4096:8"

# Reduces over GPUs in a fixed order. By default, NCCL may pick another algorithm in each run, or
# reduce in the switch.
NCCL_ALGORITHM = "Ring"


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
        if options.data.verify_corpus:
            verify_corpus(options, layout)
        samples = samples_of(plan, plan.schedule)
        with explain_out_of_memory(plan, layout):
            hook = build_hook(hook_factory, plan, layout)
        with locked_run_folder(options.run_dir):
            progress = find_progress(plan, layout)
            schedule = resumed_schedule(plan, progress.checkpoint)
            if schedule != plan.schedule:  # a hook, or an earlier command, changed the mixture
                samples = samples_of(plan, schedule)
            if progress.step >= options.train_iters:
                leave_finished(plan, layout, progress, samples)
                return
            warn_of_repeats(plan, schedule)
            load_hook(hook, progress)
            Trainer(plan, layout, progress, samples, stops, hook).run()
    # Trainer, model and process groups form reference cycles. Collecting them frees memory for the
    # next model, and stops the polling threads of the gloo groups.
    gc.collect()


def verify_corpus(options: PretrainOptions, layout: Layout) -> None:
    """Verify the hashes of the corpus's token files, sharded over the ranks.

    Raises:
        UserError: on every rank, if any file does not match its hash.
    """
    assert options.corpus is not None
    corpus = Corpus.load(options.corpus)
    share = layout.rank, layout.world_size
    total = corpus.bytes_to_verify(*share)
    with progress_bar(total, "B", "verifying the corpus", quiet=not layout.is_main) as bar:
        on_every_rank(lambda: corpus.verify(*share, bar.update))


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


def leave_finished(
    plan: TrainingPlan, layout: Layout, progress: Progress, samples: BlendedTokens
) -> None:
    """Report a finished run; update run.json if it predates the last checkpoint."""
    assert progress.run is not None
    if progress.run.status != "finished":
        records = RunRecords(plan, layout, samples, progress)
        records.write_run(progress.step, "finished", progress.guard.get("skipped", 0))
    if layout.is_main:
        print(f"{plan.options.run_dir} is finished at step {progress.step}; nothing to do")


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
        self.plan, self.options, self.layout, self.stops = plan, options, layout, stops
        self.hook, self.progress = hook, progress
        if progress.checkpoint:
            check_same_samples(samples, progress.checkpoint)
        self.records = RunRecords(plan, layout, samples, progress)
        self.log = RunLog(self.records)
        self.checkpoints = CheckpointWriter(self.records)
        self.batches: Iterator[Batch] = micro_batches(
            samples,
            options.global_batch_size,
            options.micro_batch_size,
            layout.data_rank,
            layout.data_size,
            start_step=progress.step,
        )
        with explain_out_of_memory(plan, layout, hook):
            if hook:
                hook.prepare()
            self.model = build_trained_model(plan, layout, progress, hook)
            self.watch = HookRunner(hook, self.model.passes, self.records) if hook else None
            if wants_dry_step(options.dry_first_step, layout.device):
                dry_first_step(plan, layout, self.model)
        self.model.optimizer.accepts = self._judge
        self.validation = open_validation(plan, self.model.passes, layout)
        self.profiler = StepProfiler(options.profiling, options.run_dir, layout)
        self.agreement = StepSync(layout)
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
        """Train to the last step; run.json on disk tracks the progress."""
        signals = self.agreement.signals(self.stops.flags())
        if signals:
            print_not_started(self.records, ", ".join(signals))
            return
        with contextlib.ExitStack() as closing:  # closes both, even if closing one fails
            closing.callback(self.log.close)
            self._begin()
            closing.callback(lambda: self.profiler.finish(self.step))
            self._train()
        self._leave()

    def _begin(self) -> None:
        """Write the first record, after truncating or replacing the output of an earlier run."""
        with starting_run(self.options.run_dir, overwrite=self.options.overwrite):
            self.log.open()
            go_back(self.progress, self.options.run_dir)
            self.record("running")
        print_start(self.records)

    def _train(self) -> None:
        """Run the remaining steps; record a failure or interruption."""
        try:
            memory = explain_out_of_memory(self.plan, self.layout, self.hook)
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
        """Run the remaining steps, or until all ranks agree to stop."""
        self.log.meter.restart_clock()
        while self.step < self.options.train_iters and not self.stop_reasons:
            self._run_step()
            self._log_and_save()
        if self.checkpoints.wait():
            self.record("running")

    def _batches_ahead(self) -> contextlib.AbstractContextManager[Iterator[Batch]]:
        """Prefetch batches, but not across a step at which a hook may change the mixture."""
        interval = self.hook.mixture_interval if self.hook else 0
        steps = steps_between_changes(self.step, self.options.train_iters, interval)
        chunks = [count * self.model.passes.shape.num_microbatches for count in steps]
        return read_ahead(self.batches, self.layout.device, chunks)

    def _run_step(self) -> None:
        """Run one step, which the guard may skip.

        Raises:
            UserError: if too many consecutive steps were skipped.
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
            self.watch.undo_step()
        if self.skipped.too_many(is_last=self._is_last):
            self._write_log(validate=False)
            self.checkpoints.wait()
            raise self.skipped.error()

    def _forward_backward(self) -> torch.Tensor:
        """Run a step's passes, then start the all-reduce of loss and stop flags."""
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
        """Whether the step may update the model; called by the optimizer with the norm."""
        return self.skipped.accepts(self.step, self.agreement.loss(), grad_norm)

    def _log_and_save(self) -> None:
        """Log, validate and save where this step is due.

        No checkpoint is written during a streak of skipped steps, so that the one before the streak
        is kept. The exception is the run's last checkpoint, for which none is deleted.
        """
        self.save_is_due |= self.step % self.options.save_interval == 0
        leaving = self._is_last or bool(self.stop_reasons)
        save = (leaving and self.skipped.updates > 0) or (
            self.save_is_due and not self.skipped.streak
        )
        validate = self.validation is not None and (
            self.step % self.options.validation.eval_interval == 0
            or (self._is_last and self.options.validation.eval_last_step)
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
        standing = LogState(
            self.step,
            self.model.lr,
            self.skipped.count,
            self.skipped.since_log(),
            losses,
            self.watch.metrics() if self.watch else None,
        )
        self.log.write(interval, standing)

    def _save(self, *, is_last: bool) -> None:
        """Write a checkpoint, or start an asynchronous save, and update run.json."""
        with self.log.phases.during("saving"):
            hook = self.watch.state() if self.watch else None
            record = self.records.checkpoint(self.step, self.skipped.state(), hook)
            self.checkpoints.save(self.model.state(), record, is_last=is_last)
            self.record("running")
        self.save_is_due = False
        self.log.meter.restart_clock()

    def record(self, status: Status) -> None:
        """Update run.json, on rank 0."""
        self.records.write_run(self.step, status, self.skipped.count, self._stopped_by)

    def _leave(self) -> None:
        if self._stopped_by is None:
            self.record("finished")
            print_finished(self.records, self.step)
            return
        self.record("interrupted")
        print_stopped(self.records, self.step, self._stopped_by, saved=self.skipped.updates > 0)

    @property
    def _is_last(self) -> bool:
        return self.step == self.options.train_iters

    @property
    def _stopped_by(self) -> str | None:
        """Why the run stops before its last step, if it does."""
        return None if self._is_last else ", ".join(self.stop_reasons) or None


def print_start(records: RunRecords) -> None:
    """Print what is trained, and on what."""
    if not records.layout.is_main:
        return
    plan, layout, step = records.plan, records.layout, records.first_step
    verb = f"continuing at step {step}" if step else "training"
    print(
        f"{verb}: {_size(plan)}, {plan.shape.num_parameters:,} parameters, "
        f"{plan.options.train_iters} steps of {plan.tokens_per_step:,} tokens on "
        f"{layout.world_size} x {layout.describe()['device']} (tensor {layout.tensor_size}, "
        f"pipeline {layout.pipeline_size}, data {layout.data_size})"
    )
    if plan.pretrained and not step:
        print("\n".join(plan.pretrained.lines))
    print("\n".join(_mixture_lines(records)))
    behind = plan.options.profiling.profile_step_start
    if plan.options.profiling.profile and behind < step:
        print(f"no --profile: the run is past --profile-step-start {behind}; give {step} or more")


def print_finished(records: RunRecords, step: int) -> None:
    """Print a summary, and the next command to run."""
    if not records.layout.is_main:
        return
    options = records.plan.options
    print(
        f"{_summary(records, step)}\n"
        f"next: tools/compute_mixture.py or tools/evaluate.py perplexity, with "
        f"--corpus {options.corpus or 'CORPUS'} --checkpoint {options.run_dir}"
    )


def print_stopped(records: RunRecords, step: int, stopped_by: str, *, saved: bool) -> None:
    """Print why the run stopped early, and how to resume it."""
    if not records.layout.is_main:
        return
    nothing = f"stopped at step {step}: no step has updated the model, so there is nothing to save"
    print(
        f"{_summary(records, step) if saved else nothing}\n"
        f"stopped by {stopped_by} at step {step} of {records.plan.options.train_iters}; to go on, "
        "run the same command again"
    )


def print_not_started(records: RunRecords, stopped_by: str) -> None:
    """Report that the run stopped before its first step and left its folder unchanged."""
    if records.layout.is_main:
        print(
            f"stopped by {stopped_by} before step {records.first_step + 1} of "
            f"{records.plan.options.train_iters}; to go on, run the same command again"
        )


def _size(plan: TrainingPlan) -> str:
    size = plan.shape.size
    return plan.options.model_size or f"{size.num_layers} layers of width {size.hidden_size}"


def _summary(records: RunRecords, step: int) -> str:
    cost = records.cost(step)
    return (
        f"trained to step {step} in {duration(cost.wall_seconds)}, {cost.flops:.2e} FLOPs\n"
        f"drawn so far:\n{sampled_lines(records.drawn())}\n"
        f"checkpoint: {step_folder(records.plan.options.run_dir, step)}"
    )


def _mixture_lines(records: RunRecords) -> list[str]:
    """The mixture that the run starts or resumes with, and the planned changes."""
    plan, schedule = records.plan, records.samples.schedule
    epochs = planned_epochs(plan.data, schedule, plan.num_samples, plan.options.seq_length)
    lines = [
        f"mixture {plan.mixture.method}: "
        + ", ".join(
            f"{name} {domain.weight:.3f} ({epochs[name]:.2f} epochs)"
            for name, domain in records.drawn().items()
        )
    ]
    done = records.samples_at(records.first_step)
    for phase in schedule.phases:
        if phase.first_sample >= max(done, 1):
            shares = zip(plan.data.names, phase.weights, strict=True)
            step = phase.first_sample // plan.options.global_batch_size
            lines.append(f"from step {step}: " + ", ".join(f"{n} {w:.3f}" for n, w in shares))
    return lines


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
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    os.environ.setdefault("NCCL_ALGO", NCCL_ALGORITHM)
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # Nothing here reads uninitialized memory, so filling every new tensor would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
