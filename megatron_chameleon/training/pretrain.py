"""A training run: from options to a finished run on disk."""

from __future__ import annotations

import contextlib
import gc

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.blend.boundaries import DocumentBoundaries
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.sampler import check_batch_sizes
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.parallel.layout import (
    Layout,
    check_interleaving,
    distributed,
    from_main,
    on_every_rank,
)
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.training.determinism import deterministic_algorithms
from megatron_chameleon.training.dry_step import check_host_memory, told_out_of_memory
from megatron_chameleon.training.loop import Trainer
from megatron_chameleon.training.plan import TrainingPlan, plan_training, warn_of_repeats
from megatron_chameleon.training.records import RunRecords
from megatron_chameleon.training.resume import Progress, find_progress, resumed_schedule
from megatron_chameleon.training.run_folder import held_folder
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.watch import MakeHook, load_hook, make_hook
from megatron_chameleon.training.way_out import BY_FLAGS, WayOut


def pretrain(
    options: PretrainOptions,
    watched_by: MakeHook | None = None,
    stops: StopRequests | None = None,
    way_out: WayOut = BY_FLAGS,
) -> None:
    """Train, or go on training, what ``options`` describe. Every rank calls this.

    Args:
        options: of the run.
        watched_by: makes the hook of a method that watches the run, if one does.
        stops: what takes the signals that ask for a stop, where they are taken already; during
            this call otherwise.
        way_out: what to advise where the run's folder holds something else.

    Raises:
        UserError: for a mistake in the options or in what they name, before anything is written or
            deleted; later, if too many steps in a row have to be skipped.
    """
    with (
        contextlib.nullcontext(stops) if stops else StopRequests(options.stopping) as stops,
        deterministic_algorithms(options.deterministic),
        distributed(options.parallel, options.seed) as layout,
    ):
        plan = from_main(lambda: plan_training(options, way_out))
        check_batch_sizes(options.global_batch_size, options.micro_batch_size, layout.data_size)
        check_interleaving(
            options.parallel,
            options.global_batch_size // (options.micro_batch_size * layout.data_size),
        )
        check_host_memory(plan, layout)
        if options.data.verify_corpus:
            verify_corpus(options, layout)
        samples = samples_of(plan, plan.schedule)
        with told_out_of_memory(plan, layout):
            hook = make_hook(watched_by, plan, layout)
        with held_folder(options.run_dir, way_out.elsewhere):
            progress = find_progress(plan, layout)
            schedule = resumed_schedule(plan, progress.checkpoint)
            if schedule != plan.schedule:  # they have changed in ways that the options do not say
                samples = samples_of(plan, schedule)
            if progress.step >= options.train_iters:
                leave_finished(plan, layout, progress, samples)
                return
            warn_of_repeats(plan, schedule)
            load_hook(hook, progress, way_out)
            Trainer(plan, layout, progress, samples, stops, hook).run()
    # A trainer and its model refer to each other, and to the process groups: the room is for the
    # next model, and each group of gloo has threads that poll for as long as it is there.
    gc.collect()


def verify_corpus(options: PretrainOptions, layout: Layout) -> None:
    """Compare the hashes of the corpus's token files; the ranks share the work.

    Raises:
        UserError: on every rank, if one of them finds a file which is not what it was.
    """
    assert options.corpus is not None
    corpus = Corpus.load(options.corpus)
    share = layout.rank, layout.world_size
    total = corpus.share_bytes(*share)
    with progress_bar(total, "B", "verifying the corpus", quiet=not layout.is_main) as bar:
        on_every_rank(lambda: corpus.verify(*share, bar.update))


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


def leave_finished(
    plan: TrainingPlan, layout: Layout, progress: Progress, samples: BlendedTokens
) -> None:
    """Say that there is nothing to do; run.json may be of before the last checkpoint."""
    assert progress.run is not None
    if progress.run.status != "finished":
        records = RunRecords(plan, layout, samples, progress)
        records.write_run(progress.step, "finished", progress.guard.get("skipped", 0))
    if layout.is_main:
        print(f"{plan.options.run_dir} is finished at step {progress.step}; nothing to do")
