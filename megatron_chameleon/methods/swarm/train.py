"""A swarm of small proxies: an ordinary run of pretrain_gpt for each mixture.

Each rank trains its shard of the members in worker processes, several concurrently. The ranks
exchange stop requests, errors and progress a few times a second. folder.py describes the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch

from megatron_chameleon.artifacts import Corpus, Cost, TrainingRun
from megatron_chameleon.artifacts.checkpoint import FOLDER_NAME as CHECKPOINTS
from megatron_chameleon.artifacts.swarm import (
    MemberRecord,
    SwarmRecord,
    member_path,
)
from megatron_chameleon.artifacts.training_run import METRICS_NAME as RUN_METRICS
from megatron_chameleon.artifacts.training_run import read_metrics
from megatron_chameleon.blend.dataset import check_enough_tokens
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.corpus.domains import describe_cut, open_domains
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream import check_tasks, evaluate_downstream
from megatron_chameleon.evaluation.options import DownstreamOptions
from megatron_chameleon.methods.online import options as online_options
from megatron_chameleon.methods.swarm import RunOptions, SwarmOptions
from megatron_chameleon.methods.swarm.folder import (
    SwarmResult,
    collect,
    model_config,
    open_folder,
    options_of_swarm,
    unfinished,
    write_member_mixture,
)
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.memory import TrainingSetup, peak_bytes_per_rank
from megatron_chameleon.parallel.layout import Layout, distributed, from_main, on_every_rank
from megatron_chameleon.parallel.options import ParallelOptions, TrainingParallelOptions
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.study.executor import Executor, Job
from megatron_chameleon.study.ray import map_on_ray
from megatron_chameleon.study.workers import portable, workers
from megatron_chameleon.training.options import (
    CheckpointingOptions,
    GuardOptions,
    LoggingOptions,
    PretrainOptions,
    ValidationOptions,
)
from megatron_chameleon.training.run_folder import locked_run_folder, on_main
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.trainer import pretrain

LOG_NAME = "log.txt"
# Default of --max-loss, as a multiple of the loss of uniform guessing.
MAX_LOSS_FACTOR = 1.5
# Share of the memory that members may use. Workspaces, fragmentation and other processes need the
# rest.
USED_SHARE = 0.8
# Memory of a process in addition to its tensors: libraries, and the CUDA context on a GPU.
PROCESS_BYTES = 1 << 30
# Maximum tokens in a forward pass of one member. Larger passes are not needed, since concurrent
# members fill the device.
TOKENS_ON_CPU, TOKENS_ON_GPU = 1 << 10, 1 << 14
# Maximum concurrent members on a GPU: more processes do not increase the throughput.
MEMBERS_ON_GPU = 8
POLL_SECONDS = 0.2
# Environment variables that would make a worker join torchrun's process group, or log to Weights &
# Biases.
NOT_FOR_WORKERS = ("RANK", "WORLD_SIZE", "WANDB_API_KEY")


@dataclasses.dataclass(frozen=True)
class Swarm:
    """A swarm, and the settings with which this session trains it.

    Attributes:
        options: options of the swarm.
        corpus: training and held-out text.
        mixtures: [n, k] float64, the mixture of each member.
        folder: folder of the swarm.
        micro_batch_size: sequences per forward pass of a member.
        members_at_once: members trained concurrently on each device.
        num_ranks: number of ranks that train members in this session.
        max_loss: held-out loss above which a member counts as diverged; nats per token.
    """

    options: SwarmOptions
    corpus: Corpus
    mixtures: Array
    folder: Path
    micro_batch_size: int
    members_at_once: int
    num_ranks: int
    max_loss: float

    def member_run(self, member: int) -> PretrainOptions:
        """Return the options with which pretrain_gpt would train a member."""
        options, folder = self.options, member_path(self.folder, member).with_suffix("")
        digest = hashlib.sha256(f"{options.seed}/member/{member}".encode()).digest()
        return online_options.PretrainOptions(
            run_dir=folder,
            corpus=self.corpus.root,
            mixture=str(folder / "mixture.json"),
            model=options.model,
            architecture=options.architecture,
            train_iters=options.train_iters,
            seq_length=options.seq_length,
            global_batch_size=options.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            target_tokens=options.target_tokens,
            seed=int.from_bytes(digest[:4], "little"),
            bf16=options.bf16,
            deterministic=options.deterministic,
            dry_first_step="off",
            log_interval=options.log_interval,
            save_interval=options.save_interval or options.train_iters,
            data=DataOptions(permutation=options.permutation),
            optimizer=options.optimizer,
            checkpointing=CheckpointingOptions(keep_last_checkpoints=1),
            guards=GuardOptions(max_consecutive_skipped_steps=1),
            validation=ValidationOptions(
                eval_interval=options.measured_steps[0],
                eval_tokens=options.eval_tokens,
                eval_last_step=True,
            ),
            logging=LoggingOptions(tensorboard=False),
        )


def train_swarm(
    options: SwarmOptions,
    corpus: Corpus,
    mixtures: Array,
    folder: Path,
    frozen_mixture: str | None = None,
) -> SwarmResult | None:
    """Train or resume a swarm, one member per mixture. Every rank calls this.

    Args:
        options: options of the swarm.
        corpus: training and held-out text.
        mixtures: [n, k] float64, weights of ``corpus.names`` that sum to 1; those of rank 0 are
            used. A larger n than in the folder adds members.
        folder: folder of the swarm, on storage that all ranks share.
        frozen_mixture: hash of the mixture of ``--freeze``, to record it.

    Returns:
        The losses, the same on every rank; None after a stop request.

    Raises:
        UserError: for a mistake in the options, a folder of another swarm, or a failed member.
    """
    with _ranks(options) as (stops, layout):
        mixtures = from_main(lambda: mixtures)
        from_main(lambda: _check(options, corpus, mixtures, unfinished(folder, len(mixtures))))
        with on_main(locked_run_folder(folder)):
            members = from_main(
                lambda: open_folder(options, corpus, mixtures, folder, frozen_mixture)
            )
            _train_on_ranks(options, corpus, mixtures, folder, members, layout, stops)
            if from_main(lambda: unfinished(folder, len(mixtures))):
                if layout.is_main:
                    print(f"stopped; the same command resumes the swarm in {folder}")
                return None
            return from_main(lambda: collect(SwarmRecord.load(folder), options))


def run_members(run: RunOptions) -> bool:
    """Train the unfinished members of a generated swarm, or those of ``--members``.

    Every rank calls this. Concurrent jobs may train different members.

    Returns:
        Whether these members are finished, the same on every rank; False after a stop request.

    Raises:
        UserError: for a folder without a swarm or of another corpus, or a failed member.
    """
    corpus, record = Corpus.load(run.corpus), SwarmRecord.load(run.swarm_dir)
    if (record.domains, record.corpus_hash) != (corpus.names, corpus.hash):
        raise UserError(
            f"{record.root} was generated for another corpus than {corpus.root}; pass --corpus"
        )
    mixtures, folder = np.array(record.mixtures), record.root
    first, last = run.member_range or (0, len(mixtures) - 1)
    if first >= len(mixtures):
        raise UserError(f"--members {run.members}: {folder} has the members 0:{len(mixtures) - 1}")
    options = options_of_swarm(record)
    at_once = run.members_at_once or options.members_at_once
    options = dataclasses.replace(options, members_at_once=at_once, stopping=run.stopping)

    def members_left() -> list[int]:
        return [each for each in unfinished(folder, len(mixtures)) if first <= each <= last]

    if run.ray:
        if "RANK" in os.environ:
            raise UserError("--ray: run the command without torchrun; Ray starts the processes")
        members = members_left()
        _check(options, corpus, mixtures, members)
        print(f"swarm: training {len(members)} members ({options.model}) on Ray", flush=True)
        train = functools.partial(_train_on_ray, options, corpus.root, mixtures, folder)
        with progress_bar(len(members), " members", "swarm") as bar:
            for _ in map_on_ray(train, members, tasks_per_gpu=at_once or 1):
                bar.update()
        _print_finished(folder, len(mixtures))
        return True
    with _ranks(options) as (stops, layout):
        members = from_main(members_left)
        from_main(lambda: _check(options, corpus, mixtures, members))
        _train_on_ranks(options, corpus, mixtures, folder, members, layout, stops)
        finished = not from_main(members_left)
        if layout.is_main and finished:
            _print_finished(folder, len(mixtures))
        elif layout.is_main:
            print(f"stopped; the same command resumes the members in {folder}")
        return finished


def _print_finished(folder: Path, count: int) -> None:
    """Print how many of ``count`` members are finished, and the next command if all are."""
    left = len(unfinished(folder, count))
    collect = f"; collect their losses: megatron-chameleon swarm collect --swarm-dir {folder}"
    print(f"{count - left} of {count} members are finished{'' if left else collect}")


@contextlib.contextmanager
def _ranks(options: SwarmOptions) -> Iterator[tuple[StopRequests, Layout]]:
    """Provide the stop requests and the process group of this session."""
    parallel = ParallelOptions(distributed_timeout_minutes=options.distributed_timeout_minutes)
    with StopRequests(options.stopping) as stops, distributed(parallel, options.seed) as layout:
        yield stops, layout


def _check(options: SwarmOptions, corpus: Corpus, mixtures: Array, members: Sequence[int]) -> None:
    """Raise UserError if ``members`` cannot be trained."""
    data = open_domains(corpus).cut(options.tokens, options.target_tokens)
    check_enough_tokens(data, mixtures.max(axis=0).tolist(), options.seq_length)
    model_config(options, corpus)
    if options.downstream.tasks and members:
        corpus_tokenizer(corpus)
        check_tasks(options.downstream)


def _session(
    options: SwarmOptions,
    corpus: Corpus,
    mixtures: Array,
    folder: Path,
    device: torch.device,
    members: int,
    num_ranks: int = 1,
) -> Swarm:
    """Return the settings with which a process trains ``members`` members on ``device``."""
    config = model_config(options, corpus)
    micro_batch_size, at_once = concurrency(options, config, device, members)
    return Swarm(
        options=options,
        corpus=corpus,
        mixtures=mixtures,
        folder=folder,
        micro_batch_size=micro_batch_size,
        members_at_once=at_once,
        num_ranks=num_ranks,
        max_loss=options.max_loss or MAX_LOSS_FACTOR * math.log(config.vocab_size),
    )


def _train_on_ranks(
    options: SwarmOptions,
    corpus: Corpus,
    mixtures: Array,
    folder: Path,
    members: Sequence[int],
    layout: Layout,
    stops: StopRequests,
) -> None:
    """Train ``members``, of which each rank trains a shard, until a stop request."""
    shard = members[layout.rank :: layout.world_size]
    swarm = _session(
        options, corpus, mixtures, folder, layout.device, len(shard), layout.world_size
    )
    if layout.is_main:
        print(
            f"swarm: training {len(members)} of {len(mixtures)} members "
            f"({options.model}), {swarm.members_at_once} concurrently on each of "
            f"{layout.world_size} device(s), {swarm.micro_batch_size} sequence(s) per pass",
            *describe_cut(options.tokens, options.target_tokens),
            sep="\n",
            flush=True,
        )
    _train_members(swarm, shard, layout, stops)


def _train_on_ray(
    options: SwarmOptions,
    corpus: Path,
    mixtures: Array,
    folder: Path,
    member: int,
) -> None:
    """Train or resume a member in a Ray worker."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # On a CPU, Ray runs a member on each core.
    cores = len(os.sched_getaffinity(0))
    at_once = cores if device.type == "cpu" else options.members_at_once or 1
    options = dataclasses.replace(options, members_at_once=at_once)
    swarm = _session(options, Corpus.load(corpus), mixtures, folder, device, at_once)
    try:
        finished = train_member(_prepare_worker(swarm, device.type), member)
    except Exception as error:
        raise _member_error(swarm, member, portable(error)) from error
    if not finished:
        # The machine is being shut down. Ray starts the task again after the death of its worker.
        os._exit(1)


def concurrency(
    options: SwarmOptions, config: ModelConfig, device: torch.device, members: int
) -> tuple[int, int]:
    """Return the micro batch size, and how many ``members`` a device trains concurrently.

    Both default to the largest numbers that the memory and the CPU cores allow. The micro batch
    size depends on the total memory, not on the free memory, so that a resumed swarm computes the
    same losses.
    """
    on_gpu, ranks_here = device.type == "cuda", int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_gpu:
        free, total = torch.cuda.mem_get_info(device)
    else:
        memory = psutil.virtual_memory()
        free, total = memory.available // ranks_here, memory.total // ranks_here

    def member_bytes(size: int) -> int:
        passes = options.global_batch_size // size
        serial, length = TrainingParallelOptions(), options.seq_length
        setup = TrainingSetup(config, serial, 1, size, passes, options.bf16, length)
        return PROCESS_BYTES + peak_bytes_per_rank(setup)

    size, at_once = options.micro_batch_size, options.members_at_once
    if size is None:
        most = max(1, (TOKENS_ON_GPU if on_gpu else TOKENS_ON_CPU) // options.seq_length)
        divisors = [d for d in range(1, most + 1) if options.global_batch_size % d == 0]
        fitting = [d for d in divisors if member_bytes(d) <= total * USED_SHARE]
        size = max(fitting, default=1)
    if at_once is None:
        cores = len(os.sched_getaffinity(0)) // ranks_here
        most = min(cores, MEMBERS_ON_GPU) if on_gpu else cores
        at_once = min(most, int(free * USED_SHARE / member_bytes(size)))
    return size, max(1, min(at_once, members))


def _train_members(
    swarm: Swarm, members: Sequence[int], layout: Layout, stops: StopRequests
) -> None:
    """Train ``members`` on this rank until all are finished, or any rank stops or fails.

    Raises:
        UserError: on every rank, if a member failed on any rank. Raised only after the running
            members have saved checkpoints.
    """
    count = min(len(members), swarm.members_at_once)
    error: UserError | None = None
    finished, stopping = 0, False
    total = torch.tensor(len(members), device=layout.device)
    torch.distributed.all_reduce(total)
    bar = progress_bar(int(total), " members", "swarm", quiet=not layout.is_main)
    prepare = functools.partial(_prepare_worker, swarm, layout.device.type)
    preload = __name__ if layout.device.type == "cpu" else None
    with bar, workers(count, prepare, "a smaller --members-at-once", preload) as launch:
        executor = Executor([_job(swarm, member) for member in members], count, launch)
        while True:
            events = executor.poll(POLL_SECONDS)
            stopped = any(stops.flags()) or any(event.state == "stopped" for event in events)
            finished += sum(event.state == "done" for event in events)
            for event in events:
                if event.error is not None:
                    error = error or _member_error(swarm, int(event.job.name), event.error)
            sums = torch.tensor(
                [stopped or error is not None, executor.is_active, finished], device=layout.device
            ).long()
            torch.distributed.all_reduce(sums)
            any_stopped, any_active, all_finished = sums.tolist()
            if any_stopped and not stopping:
                stopping = True
                executor.stop()
            bar.update(all_finished - bar.n)
            if not any_active:
                break
            if not executor.is_active:  # other ranks train members, and poll() does not wait
                time.sleep(POLL_SECONDS)

    def raise_error() -> None:
        if error is not None:
            raise error

    on_every_rank(raise_error)


def _job(swarm: Swarm, member: int) -> Job:
    return Job(
        name=str(member),
        work=functools.partial(train_member, member=member),
        done=member_path(swarm.folder, member).exists,
    )


def _prepare_worker(swarm: Swarm, device: str) -> Swarm:
    for name in NOT_FOR_WORKERS:
        os.environ.pop(name, None)
    if device == "cpu":
        torch.set_num_threads(1)  # losses must not depend on the number of concurrent members
    return swarm


def train_member(swarm: Swarm, member: int) -> bool:
    """Train or resume a member and write its result; return False if it was stopped before.

    Called in a worker process, whose output goes to the member's log. Divergence is recorded, and
    raises no error.
    """
    if member_path(swarm.folder, member).exists():
        return True  # finished since this session began, by another job or an earlier Ray task
    options, names = swarm.member_run(member), swarm.corpus.names
    folder, weights = options.run_dir, swarm.mixtures[member].tolist()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG_NAME).open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    mixture = write_member_mixture(swarm.folder, member, names, weights)
    metrics = folder / RUN_METRICS

    def skipped_step() -> int | None:
        """Return the first step whose loss or gradient was not finite, or None."""
        lines = read_metrics(metrics)
        return next((step["step"] for line in lines for step in line.get("skipped") or ()), None)

    try:
        pretrain(options)
    except UserError:
        if skipped_step() is None:
            raise
    run = TrainingRun.load(folder) if TrainingRun.exists(folder) else None
    # The status of a run that was killed is still "running".
    if run is None or run.status in ("interrupted", "running"):
        return False
    skipped = skipped_step()
    held_out = {line["step"]: line.get("validation_loss") for line in read_metrics(metrics)}
    losses: list[list[float | None]] = []
    diverged = None
    for step in swarm.options.measured_steps:
        measured = held_out.get(step)
        if measured is None or (skipped is not None and step >= skipped):
            diverged = f"its loss or gradient was not finite in step {skipped}"
            break
        losses.append([measured.get(name) for name in swarm.corpus.all_domains])
        own = own_loss(measured, mixture)
        if not own <= swarm.max_loss:
            diverged = (
                f"its held-out loss was {own:.4g} after step {step}, above {swarm.max_loss:.4g}"
            )
            break
    bits, spent = dict[str, float](), run.cost
    if swarm.options.downstream.tasks and diverged is None:
        bits, of_tasks = score_tasks(swarm.options, folder)
        spent += of_tasks
    concurrent = swarm.members_at_once
    cost = Cost(
        spent.flops,
        spent.device_seconds / concurrent,
        spent.wall_seconds / (concurrent * swarm.num_ranks),
        swarm.num_ranks,
    )
    steps = swarm.options.measured_steps[: len(losses)]
    record = MemberRecord(member, steps, losses, diverged, bits, cost)
    record.save(member_path(swarm.folder, member))
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    dataclasses.replace(run, checkpoints=[]).save()
    return True


def _member_error(swarm: Swarm, member: int, error: Exception) -> UserError:
    """Return an error that names the member; its log gets the traceback of a bug."""
    log = member_path(swarm.folder, member).with_suffix("") / LOG_NAME
    if notes := getattr(error, "__notes__", []):
        with contextlib.suppress(OSError), log.open("a") as stream:
            stream.writelines(notes)
    return UserError(f"member {member}: {error}; see {log}")


def score_tasks(options: SwarmOptions, run_dir: Path) -> tuple[dict[str, float], Cost]:
    """Evaluate the last checkpoint of a member on the tasks of ``options``.

    Returns:
        Bits per byte of the gold answers of each task, and the cost of the evaluation.

    Raises:
        UserError: if a task cannot be evaluated.
    """
    result = evaluate_downstream(
        DownstreamOptions(
            checkpoint=run_dir,
            output=run_dir / "downstream.json",
            evaluation_dtype="bfloat16" if options.bf16 else "float32",
            **vars(options.downstream),
        )
    )
    if result.gaps:
        raise UserError(f"--tasks {result.gaps[0]}; leave the task out")
    bits: dict[str, float] = {}
    for task, score in result.tasks.items():
        assert score.mean is not None
        assert score.mean.bits_per_byte is not None, "check_tasks found all gold answers"
        bits[task] = score.mean.bits_per_byte
    return bits, result.cost


def own_loss(losses: Mapping[str, float | None], mixture: Mapping[str, float]) -> float:
    """Mean of a member's held-out losses, weighted by its own mixture.

    The mean is NaN if any of these losses is NaN. Domains without weight do not count, since the
    member is not trained on them. If no domain with a weight is measured, the mean is over the
    other domains.
    """
    own = [name for name in losses if mixture.get(name)] or list(losses)
    weights = [mixture.get(name) or 1.0 for name in own]
    return float(np.average(np.array([losses[name] for name in own], np.float64), weights=weights))
