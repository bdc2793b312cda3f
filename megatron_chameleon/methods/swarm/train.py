"""A swarm of small proxies: from mixtures to held-out losses."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.work_dir import BY_WORK_DIR
from megatron_chameleon.methods.swarm.deal import Job, plan_jobs
from megatron_chameleon.methods.swarm.folder import (
    METRICS_NAME,
    RATIOS_NAME,
    begin,
    collect,
    write_tables,
)
from megatron_chameleon.methods.swarm.group import Group, Surroundings
from megatron_chameleon.methods.swarm.memory import available_bytes, pass_size
from megatron_chameleon.methods.swarm.plan import SwarmPlan, plan_swarm
from megatron_chameleon.methods.swarm.result import SwarmResult
from megatron_chameleon.methods.swarm.samples import opened
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.options.swarm import SwarmOptions
from megatron_chameleon.parallel.layout import Layout, distributed, from_main, on_every_rank
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.training.determinism import deterministic_algorithms
from megatron_chameleon.training.run_folder import held_folder
from megatron_chameleon.training.stopping import REASONS, StopRequests

__all__ = ["SwarmResult", "train_swarm"]

STOP_NAME = "stop-is-asked"


def train_swarm(
    options: SwarmOptions,
    corpus: Corpus,
    mixtures: Array,
    folder: Path,
    stops: StopRequests | None = None,
) -> SwarmResult | None:
    """Train, or go on training, one member for each mixture.

    Every rank calls this, outside of any process groups: it sets them up itself, as ``pretrain``
    does. Ranks share the members; each trains its own groups on its own device.

    Args:
        options: of the swarm.
        corpus: what its members are trained on.
        mixtures: [n, k] float64, rows over ``corpus.names`` that sum to 1. Rows may be added to a
            swarm that is there.
        folder: what the swarm writes goes there, see folder.py; all ranks see it.
        stops: what takes the signals that ask for a stop, where they are taken already; during
            this call otherwise.

    Returns:
        The same on every rank; None if it was asked to stop before its end.

    Raises:
        UserError: for a mistake in the options, or a folder of another swarm.
    """
    parallel = ParallelOptions(distributed_timeout_minutes=options.distributed_timeout_minutes)
    with (
        contextlib.nullcontext(stops) if stops else StopRequests(options.stopping) as stops,
        deterministic_algorithms(options.deterministic),
        distributed(parallel, options.seed) as layout,
    ):
        plan = from_main(lambda: plan_swarm(options, corpus, mixtures))
        with held_folder(folder, BY_WORK_DIR):
            jobs = from_main(lambda: _begun(plan, folder, layout))
            return _train_all(plan, folder, layout, jobs, stops)


def _begun(plan: SwarmPlan, folder: Path, layout: Layout) -> list[list[Job]]:
    """The jobs of each rank, after the folder has been found to be this swarm's."""
    begin(folder, plan)
    with writing(folder):
        (folder / STOP_NAME).unlink(missing_ok=True)
    size = pass_size(plan, available_bytes(layout.device), on_gpu=layout.device.type == "cuda")
    jobs = plan_jobs(plan, folder, size, layout.world_size)
    print(_announcement(plan, jobs), flush=True)
    return jobs


def _announcement(plan: SwarmPlan, jobs: list[list[Job]]) -> str:
    groups = [job for hand in jobs for job in hand]
    members = sum(len(job.members) for job in groups)
    total, size = len(plan.mixtures), plan.options.model_size
    if not groups:
        return f"swarm: all {total} members are there"
    at_once, passes = max(len(job.members) for job in groups), groups[0].micro_batch_size
    return (
        f"swarm: {members} of {total} members ({size}) to train, {at_once} at once on each of "
        f"{len(jobs)} device(s), {passes} sequence(s) of each in a pass"
    )


def _train_all(
    plan: SwarmPlan, folder: Path, layout: Layout, jobs: list[list[Job]], stops: StopRequests
) -> SwarmResult | None:
    """Train what is left of the swarm, and gather its results."""
    own = jobs[layout.rank]
    complete: list[bool] = []
    on_every_rank(lambda: complete.append(_train_own(plan, folder, layout, own, stops)))
    left = torch.tensor([float(not complete[0])], device=layout.device)
    torch.distributed.all_reduce(left)
    if left.item():
        if layout.is_main:
            print(f"the swarm in {folder} has stopped; the same command goes on with it")
        return None
    return from_main(lambda: _gathered(plan, folder))


def _train_own(
    plan: SwarmPlan, folder: Path, layout: Layout, jobs: list[Job], stops: StopRequests
) -> bool:
    """Train this rank's groups, one after the other; whether all came to their end.

    Raises:
        UserError: if the device has too little memory, or a file is damaged.
    """
    with RankWatcher(plan, layout, jobs, stops, folder / STOP_NAME) as watcher:
        if not jobs:
            return True
        around = Surroundings(plan, opened(plan.data), folder, layout.device, layout.world_size)
        for job in jobs:
            try:
                if watcher.stop_is_asked() or not Group(job, around, watcher).run():
                    return False
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"out of memory with {len(job.members)} members at once and "
                    f"{job.micro_batch_size} sequence(s) of each in a pass; give a smaller "
                    "--members-at-once or --micro-batch-size"
                ) from error
    return True


def _gathered(plan: SwarmPlan, folder: Path) -> SwarmResult:
    """The results of all members, which are written as tables too."""
    options = plan.options
    interval = options.eval_interval or options.train_iters
    steps = sorted({*range(interval, options.train_iters, interval), options.train_iters})
    result = collect(folder, plan, steps)
    write_tables(folder, result)
    kept = len(result.mixtures) - len(result.diverged)
    told = f", {len(result.diverged)} diverged and left out" if result.diverged else ""
    print(
        f"swarm: {kept} members measured{told}; written to {folder} ({RATIOS_NAME}, {METRICS_NAME})"
    )
    return result


class RankWatcher:
    """Shows how far this rank's groups are, and passes on what asks for a stop.

    Ranks do not wait for each other while they train, so a stop that one of them is asked for
    reaches the others by a file in the swarm's folder.

    Args:
        plan: of the swarm.
        layout: of the ranks; the first one shows its progress.
        jobs: this rank's.
        stops: what this rank is asked.
        sign: the file.
    """

    def __init__(
        self, plan: SwarmPlan, layout: Layout, jobs: list[Job], stops: StopRequests, sign: Path
    ) -> None:
        self._stops, self._sign = stops, sign
        total = sum(job.work for job in jobs) * plan.tokens_per_step
        title = f"swarm, rank 0 of {layout.world_size}" if layout.world_size > 1 else "swarm"
        self._bar = progress_bar(total, " tokens", title, quiet=not layout.is_main)

    def __enter__(self) -> RankWatcher:
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.close()

    def advance(self, tokens: int) -> None:
        """So many tokens have been trained on."""
        self._bar.update(tokens)

    def skip(self, tokens: int) -> None:
        """So many tokens will not be."""
        self._bar.total -= tokens

    def show(self, loss: float) -> None:
        """The members' mean training loss of the last step is this."""
        self._bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)

    def say(self, line: str) -> None:
        """Tell a person, without tearing the bar."""
        self._bar.write(line)

    def stop_is_asked(self) -> bool:
        """Whether this rank or another was asked to stop."""
        flags = self._stops.flags()
        if any(flags) and not self._sign.exists():
            asked = [reason for reason, flag in zip(REASONS, flags, strict=True) if flag]
            with writing(self._sign):
                self._sign.write_text(", ".join(asked) + "\n", encoding="utf-8")
        return any(flags) or self._sign.exists()
