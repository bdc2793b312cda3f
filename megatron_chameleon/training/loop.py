"""The training loop: from a plan to a finished run on disk."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter

from megatron_chameleon.artifacts import (
    Corpus,
    Cost,
    DomainTokens,
    Stopwatch,
    TrainingRun,
)
from megatron_chameleon.artifacts.checkpoint import (
    CheckpointRecord,
    MixturePhase,
    checkpoint_folders,
    step_folder,
)
from megatron_chameleon.artifacts.training_run import METRICS_NAME, Status
from megatron_chameleon.blend.boundaries import DocumentBoundaries
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.sampler import MicroBatchIterator, check_batch_sizes
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.checkpoint.load import load_training
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import training_state
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.parallel.layout import Layout, distributed, from_main
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.training.drawn import drawn_lines, drawn_tokens, planned_epochs
from megatron_chameleon.training.metrics import (
    Interval,
    IntervalMeter,
    append_metrics,
    duration,
    progress_line,
)
from megatron_chameleon.training.optimizer import build_optimizer, build_scheduler, data_parallel
from megatron_chameleon.training.plan import TrainingPlan, plan_training
from megatron_chameleon.training.resume import (
    Progress,
    check_same_samples,
    find_progress,
    resumed_schedule,
)
from megatron_chameleon.training.step import BatchShape, train_step


def pretrain(options: PretrainOptions) -> None:
    """Train, or go on training, what ``options`` describe. Every rank calls this.

    Raises:
        UserError: for a mistake in the options or in what they name, before anything is written or
            deleted; later, if the loss is no longer a number.
    """
    with distributed(options.parallel, options.seed) as layout:
        plan = from_main(lambda: plan_training(options))
        check_batch_sizes(options.global_batch_size, options.micro_batch_size, layout.data_size)
        if options.data.verify_corpus:
            verify_corpus(options, layout)
        samples = samples_of(plan, plan.schedule)
        progress = from_main(lambda: find_progress(plan))
        if progress.step >= options.train_iters:
            if layout.is_main:
                print(f"{options.run_dir} is finished at step {progress.step}; nothing to do")
            return
        schedule = resumed_schedule(plan, progress.checkpoint)
        if schedule != plan.schedule:  # weights have changed in ways that the options do not say
            samples = samples_of(plan, schedule)
        Trainer(plan, layout, progress, samples).run()


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
        self, plan: TrainingPlan, layout: Layout, progress: Progress, samples: BlendedTokens
    ) -> None:
        options = plan.options
        self.plan, self.options, self.layout = plan, options, layout
        self.samples = samples
        self.batches = MicroBatchIterator(
            samples,
            options.global_batch_size,
            options.micro_batch_size,
            layout.data_rank,
            layout.data_size,
            start_step=progress.step,
        )
        if progress.checkpoint:
            check_same_samples(samples, progress.checkpoint)
        unit = options.micro_batch_size * layout.data_size
        self.batch_shape = BatchShape(
            num_microbatches=options.global_batch_size // unit,
            micro_batch_size=options.micro_batch_size,
            seq_length=options.seq_length,
        )
        model = build_model(
            plan.shape,
            layout,
            options.seed,
            bf16=options.bf16,
            per_token_loss=options.boundaries.eod_mask_loss,
        )
        self.model = data_parallel(model, layout, bf16=options.bf16)
        self.optimizer = build_optimizer(self.model, options.optimizer, layout, bf16=options.bf16)
        self.scheduler = build_scheduler(self.optimizer, options.optimizer, options.train_iters)
        self.meter = IntervalMeter(plan.data.names, layout)
        self.step = self.logged_step = progress.step
        self.domain_tokens: Counter[str] = Counter()
        self.cost_before = progress.run.cost if progress.run else Cost()
        self.first_step = progress.step
        self.stopwatch = Stopwatch()
        if progress.checkpoint:
            load_training(progress.checkpoint, self.model, self.optimizer, self.scheduler)
            self.domain_tokens.update(progress.checkpoint.domain_tokens)

    def run(self) -> None:
        """Train to the last step; a run.json on disk says at any time how far it came."""
        self.record("running")
        self.announce()
        try:
            self._run_steps()
        except KeyboardInterrupt:
            self.record("interrupted")
            raise
        except Exception:
            self.record("failed")
            raise
        self.record("finished")
        self.say_goodbye()

    def _run_steps(self) -> None:
        """The steps that are left, logging and saving on the way."""
        while self.step < self.options.train_iters:
            self.meter.add(
                train_step(
                    self.model,
                    self.optimizer,
                    self.scheduler,
                    self.batches,
                    self.batch_shape,
                    num_domains=len(self.plan.data.names),
                )
            )
            self.step += 1
            last = self.step == self.options.train_iters
            save = last or self.step % self.options.save_interval == 0
            if save or self.step % self.options.log_interval == 0:
                self.log()
            if save:
                self.save()
                self.meter.restart_clock()

    def log(self) -> None:
        """Write and print the interval's figures.

        Raises:
            UserError: if the loss or the gradient is no longer a number, before a checkpoint of
                such weights is written.
        """
        interval = self.meter.read()
        self.domain_tokens.update(interval.domain_tokens_drawn)
        self.logged_step = self.step
        for name, value in (("loss", interval.loss), ("gradient's norm", interval.grad_norm)):
            if not math.isfinite(value):
                raise UserError(
                    f"the {name} is {value} at step {self.step}; lower --lr or lengthen "
                    f"--lr-warmup-iters; checkpoints up to here are in {self.options.run_dir}"
                )
        self._write_log(interval)

    def _write_log(self, interval: Interval) -> None:
        if not self.layout.is_main:
            return
        lr = self.optimizer.param_groups[0]["lr"]
        seconds = self.stopwatch.seconds()
        left = seconds / (self.step - self.first_step) * (self.options.train_iters - self.step)
        print(progress_line(self.step, self.options.train_iters, lr, interval, left), flush=True)
        append_metrics(
            self.options.run_dir / METRICS_NAME,
            {
                "step": self.step,
                "tokens": self.step * self.plan.tokens_per_step,
                "lr": lr,
                "seconds": round(self.cost_before.wall_seconds + seconds, 3),
                **dataclasses.asdict(interval),
                "drawn": {
                    name: {"asked": round(d.asked), "got": d.got, "epochs": round(d.epochs, 4)}
                    for name, d in self.drawn().items()
                },
            },
        )

    def save(self) -> None:
        """Write a checkpoint and bring run.json up to date."""
        state = training_state(self.model, self.optimizer, self.scheduler, is_loading=False)
        record = CheckpointRecord(
            root=step_folder(self.options.run_dir, self.step),
            model=dataclasses.asdict(self.plan.shape),
            step=self.step,
            samples=self.samples_done,
            domain_samples=dict(
                zip(
                    self.plan.data.names,
                    self.samples.counts(self.samples_done).tolist(),
                    strict=True,
                )
            ),
            mixture_phases=[
                MixturePhase(
                    phase.first_sample, dict(zip(self.plan.data.names, phase.weights, strict=True))
                )
                for phase in self.samples.schedule.until(self.samples_done)
            ],
            domain_tokens=dict(self.domain_tokens),
            tokenizer_hash=self.plan.data.tokenizer.sha256,
            corpus_hash=self.plan.data.hash,
            mixture_hash=self.plan.mixture.hash,
            layout=self.layout.describe(),
            files={},
            provenance=self.plan.provenance,
        )
        save_checkpoint(state, record)
        self.record("running")

    @property
    def samples_done(self) -> int:
        """Samples of the steps done."""
        return self.step * self.options.global_batch_size

    def drawn(self) -> dict[str, DomainTokens]:
        """Tokens and epochs per domain up to the last log, asked and got."""
        return drawn_tokens(
            self.plan.data,
            self.samples.schedule,
            self.logged_step * self.options.global_batch_size,
            self.options.seq_length,
            self.domain_tokens,
        )

    def record(self, status: Status) -> None:
        """Bring run.json up to date, on rank 0."""
        if not self.layout.is_main:
            return
        plan, drawn = self.plan, self.drawn()
        TrainingRun(
            root=self.options.run_dir,
            status=status,
            step=self.step,
            train_iters=self.options.train_iters,
            tokens=self.step * plan.tokens_per_step,
            model=dataclasses.asdict(plan.shape),
            parameters=plan.shape.num_parameters,
            mixture={name: domain.weight for name, domain in drawn.items()},
            mixture_method=plan.mixture.method,
            domain_tokens=drawn,
            checkpoints=[
                str(path.relative_to(self.options.run_dir))
                for path in checkpoint_folders(self.options.run_dir)
            ],
            provenance=plan.provenance,
            cost=self.cost_before + self._cost(),
        ).save()

    def announce(self) -> None:
        """Say what starts."""
        if not self.layout.is_main:
            return
        options, layout, shape = self.options, self.layout, self.plan.shape
        verb = f"continuing at step {self.step}" if self.step else "training"
        print(
            f"{verb}: {options.model_size}, {shape.num_parameters:,} parameters, "
            f"{options.train_iters} steps of {self.plan.tokens_per_step:,} tokens on "
            f"{layout.world_size} x {layout.describe()['device']} (tensor {layout.tensor_size}, "
            f"pipeline {layout.pipeline_size}, data {layout.data_size})"
        )
        plan, schedule = self.plan, self.samples.schedule
        epochs = planned_epochs(plan.data, schedule, plan.num_samples, options.seq_length)
        weights = self.drawn()
        print(
            f"mixture {plan.mixture.method}: "
            + ", ".join(
                f"{name} {domain.weight:.3f} ({epochs[name]:.2f} epochs)"
                for name, domain in weights.items()
            )
        )
        for phase in schedule.phases:
            if phase.first_sample >= max(self.samples_done, 1):
                step = phase.first_sample // options.global_batch_size
                shares = zip(plan.data.names, phase.weights, strict=True)
                print(f"from step {step}: " + ", ".join(f"{n} {w:.3f}" for n, w in shares))
        sys.stdout.flush()

    def say_goodbye(self) -> None:
        """Say what was made, and what can be run next."""
        if not self.layout.is_main:
            return
        cost = self._cost()
        print(
            f"trained to step {self.step} in {duration(cost.wall_seconds)}, "
            f"{cost.flops:.2e} FLOPs\n"
            f"drawn so far:\n{drawn_lines(self.drawn())}\n"
            f"checkpoint: {step_folder(self.options.run_dir, self.step)}\n"
            f"next: tools/compute_mixture.py or tools/evaluate.py perplexity, with "
            f"--corpus {self.options.corpus or 'CORPUS'} --checkpoint {self.options.run_dir}",
            flush=True,
        )

    def _cost(self) -> Cost:
        tokens = (self.step - self.first_step) * self.plan.tokens_per_step
        flops = training_flops(self.plan.shape, tokens, self.options.seq_length)
        return self.stopwatch.cost(flops, self.layout.world_size)
