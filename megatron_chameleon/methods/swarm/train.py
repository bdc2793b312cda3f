"""Train a swarm of small proxies: from mixtures to held-out losses.

Each member is a run of tools/pretrain_gpt.py in a worker process (member.py). Every rank trains its
part of the members, several at once, and the ranks exchange stop requests, errors and progress a
few times a second.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.swarm import member_path
from megatron_chameleon.artifacts.training_run import METRICS_NAME as RUN_METRICS
from megatron_chameleon.blend.token_data import check_enough_tokens, corpus_tokens
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.swarm.folder import (
    METRICS_NAME,
    RATIOS_NAME,
    Swarm,
    SwarmResult,
    checked_mixtures,
    collect,
    open_folder,
)
from megatron_chameleon.methods.swarm.member import LOG_NAME, Member
from megatron_chameleon.methods.swarm.options import SwarmOptions
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.memory import TrainingSetup, fullest_stage
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.parallel.layout import Layout, distributed, from_main, on_every_rank
from megatron_chameleon.parallel.options import ParallelOptions, TrainingParallelOptions
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.training.run_folder import locked_run_folder
from megatron_chameleon.training.stopping import SIGNALS, StopRequests

__all__ = ["SwarmResult", "train_swarm"]

# Times the loss of uniform guessing; a model beyond it is worse than none.
MAX_LOSS_FACTOR = 1.5
# Share of the memory to plan with; the rest is for workspaces, fragmentation and other processes.
USED_SHARE = 0.8
# Of a process besides its tensors: libraries, and on a GPU the CUDA context.
PROCESS_BYTES = 1 << 30
# Tokens of a forward pass of one member; concurrent members fill the device.
TOKENS_ON_CPU, TOKENS_ON_GPU = 1 << 10, 1 << 14
# Beyond this, more processes on a GPU only take turns.
MEMBERS_ON_GPU = 8
POLL_SECONDS = 0.2
# Exit status of a worker that was asked to stop; by a signal while it was starting.
STOPPED = (STOPPED_STATUS, *(-number for number in SIGNALS))
# Variables by which a worker would take itself for a rank, or report to Weights & Biases.
NOT_FOR_WORKERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "WANDB_API_KEY")


def train_swarm(
    options: SwarmOptions,
    corpus: Corpus,
    mixtures: Array,
    folder: Path,
    stops: StopRequests | None = None,
) -> SwarmResult | None:
    """Train or resume a swarm, one member per mixture.

    Every rank calls this, outside of any process groups.

    Args:
        options: of the swarm.
        corpus: what its members are trained on.
        mixtures: [n, k] float64, rows over ``corpus.names`` that sum to 1. A larger n than on disk
            adds members.
        folder: of the swarm, on storage that all ranks share; see folder.py.
        stops: stop-signal handler; created for this call if None.

    Returns:
        The same on every rank; None if a stop was requested.

    Raises:
        UserError: for a mistake in the options, or a folder of another swarm.
    """
    parallel = ParallelOptions(distributed_timeout_minutes=options.distributed_timeout_minutes)
    with (
        contextlib.nullcontext(stops) if stops else StopRequests(options.stopping) as stops,
        distributed(parallel, options.seed) as layout,
    ):
        shape = from_main(lambda: _check(options, corpus, mixtures))
        swarm = Swarm(options, corpus, checked_mixtures(mixtures, corpus), folder)
        with locked_run_folder(folder):
            from_main(lambda: open_folder(swarm))
            with Workers(swarm, shape, layout) as workers:
                if not _train(workers, layout, stops):
                    if layout.is_main:
                        print(f"stopped; the same command resumes the swarm in {folder}")
                    return None
            return from_main(lambda: _finish(swarm))


def _check(options: SwarmOptions, corpus: Corpus, mixtures: Array) -> ModelShape:
    """Shape of the members. Raises UserError for what no member could be trained with."""
    size, data = model_size(options.model_size), corpus_tokens(corpus)
    weights = checked_mixtures(mixtures, corpus).max(axis=0)
    check_enough_tokens(data, weights.tolist(), options.seq_length)
    return ModelShape(size, data.tokenizer.vocab_size, options.seq_length)


def _train(workers: Workers, layout: Layout, stops: StopRequests) -> bool:
    """Train the members that are left on all ranks; whether all finished.

    Raises:
        UserError: on every rank, if a worker failed on one; the other workers save first.
    """
    total = torch.tensor(workers.progress()[0], device=layout.device)
    torch.distributed.all_reduce(total)
    title = f"swarm on {layout.world_size} ranks" if layout.world_size > 1 else "swarm"
    problem: UserError | None = None
    stopping = False
    with progress_bar(int(total), " tokens", title, quiet=not layout.is_main) as bar:
        while True:
            try:
                stopped = workers.poll() or any(stops.flags())
            except UserError as error:
                problem, stopped = problem or error, True
            figures = [float(stopped), workers.busy, *workers.progress()]
            sums = torch.tensor(figures, dtype=torch.float64, device=layout.device)
            torch.distributed.all_reduce(sums)
            any_stopped, busy, tokens_left, losses, measured = sums.tolist()
            if any_stopped and not stopping:
                stopping = True
                workers.stop()
            if not stopping:
                if measured:
                    bar.set_postfix_str(f"loss {losses / measured:.3f}", refresh=False)
                bar.update(int(total) - int(tokens_left) - bar.n)
            if not busy:
                break
            time.sleep(POLL_SECONDS)

    def raise_problem() -> None:
        if problem is not None:
            raise problem

    on_every_rank(raise_problem)
    return not stopping or from_main(lambda: not workers.swarm.unfinished())


def _finish(swarm: Swarm) -> SwarmResult:
    result = collect(swarm)
    kept = len(result.mixtures) - len(result.diverged)
    diverged = f", {len(result.diverged)} diverged and left out" if result.diverged else ""
    print(
        f"swarm: {kept} members measured{diverged}; written to {swarm.folder} ({RATIOS_NAME}, "
        f"{METRICS_NAME})"
    )
    return result


@dataclasses.dataclass
class Worker:
    """A worker process, and the member that it trains."""

    process: subprocess.Popen[bytes]
    member: int


class Workers:
    """Worker processes of one rank, and the members that it has left to train.

    Args:
        swarm: to train.
        shape: of its members.
        layout: of the ranks, which get every ``world_size``-th unfinished member each.
    """

    def __init__(self, swarm: Swarm, shape: ModelShape, layout: Layout) -> None:
        self.swarm, self.layout = swarm, layout
        unfinished = from_main(swarm.unfinished)
        self._pending = collections.deque(unfinished[layout.rank :: layout.world_size])
        self._workers: list[Worker] = []
        options, device = swarm.options, layout.device
        loss = options.max_loss or MAX_LOSS_FACTOR * math.log(shape.vocab_size)
        self._max_loss, self._tokens = loss, options.global_batch_size * options.seq_length
        self.micro_batch_size = micro_batch_size(options, shape, device)
        self.at_once = members_at_once(
            options, shape, device, self.micro_batch_size, len(self._pending)
        )
        if layout.is_main:
            print(
                f"swarm: {len(unfinished)} of {len(swarm.mixtures)} members "
                f"({options.model_size}) to train, {self.at_once} at once on each of "
                f"{layout.world_size} device(s), {self.micro_batch_size} sequence(s) per pass",
                flush=True,
            )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_error: object) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.wait()

    @property
    def busy(self) -> int:
        """Number of members in progress or to be started."""
        return len(self._pending) + len(self._workers)

    def progress(self) -> tuple[int, float, int]:
        """Tokens left to train on; sum of the losses of members in progress, and their number."""
        logged = [self._last_log(worker.member) for worker in self._workers]
        steps = self.busy * self.swarm.options.train_iters - sum(step for step, _ in logged)
        losses = [loss for _, loss in logged if loss is not None]
        return steps * self._tokens, math.fsum(losses), len(losses)

    def poll(self) -> bool:
        """Assign members to idle workers and start missing ones; returns whether one was stopped.

        Raises:
            UserError: if a worker failed.
        """
        for worker in list(self._workers):
            finished = member_path(self.swarm.folder, worker.member).is_file()
            status = worker.process.poll()
            if status is None and not finished:
                continue
            if finished and status is None and self._pending:
                worker.member = self._pending.popleft()
                self._send(worker)
                continue
            self._workers.remove(worker)
            if finished:
                self._dismiss(worker)
            elif status in STOPPED:
                return True
            elif status is not None:
                raise self._failure(worker.member, status)
        while self._pending and len(self._workers) < self.at_once:
            self._workers.append(self._started(self._pending.popleft()))
        return False

    def stop(self) -> None:
        """Ask the workers to save and exit; start no other members."""
        self._pending.clear()
        for worker in self._workers:
            worker.process.terminate()

    def _started(self, member: int) -> Worker:
        """A new worker process, with its first member."""
        log = self.swarm.run_folder(member) / LOG_NAME
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "megatron_chameleon.methods.swarm.member"],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                env=self._environment(),
            )
        worker = Worker(process, member)
        self._send(worker)
        return worker

    def _send(self, worker: Worker) -> None:
        weights = self.swarm.mixtures[worker.member].tolist()
        member = Member(
            number=worker.member,
            swarm=self.swarm.folder,
            run=self.swarm.member_run(worker.member, self.micro_batch_size),
            weights=dict(zip(self.swarm.corpus.names, weights, strict=True)),
            steps=self.swarm.options.measured_steps,
            max_loss=self._max_loss,
            num_ranks=self.layout.world_size,
            per_device=self.at_once,
        )
        self._write(worker, member)

    def _dismiss(self, worker: Worker) -> None:
        self._write(worker, None)
        worker.process.wait()

    def _write(self, worker: Worker, member: Member | None) -> None:
        assert worker.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # poll() finds out why it has gone
            pickle.dump(member, worker.process.stdin)
            worker.process.stdin.flush()

    def _environment(self) -> dict[str, str]:
        """Environment of a worker: one device, and one thread on the CPU."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in NOT_FOR_WORKERS and not name.startswith("TORCHELASTIC_")
        }
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        if self.layout.device.type == "cuda":
            visible = [
                name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name
            ]
            index = torch.cuda.current_device()
            environment["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)
        else:
            # Sums are then in the same order however many members are trained at once.
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return environment

    def _failure(self, member: int, status: int) -> UserError:
        log = self.swarm.run_folder(member) / LOG_NAME
        if status == 2:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            return UserError(f"member {member}: {''.join(last).removeprefix('error: ')}")
        if status < 0:
            return UserError(
                f"member {member} was killed by signal {-status}, as the system does when memory "
                "runs out; run the same command again, perhaps with a smaller --members-at-once"
            )
        return UserError(f"member {member} failed with status {status}; see {log}")

    def _last_log(self, member: int) -> tuple[int, float | None]:
        """Step and loss of the last line of a member's metrics."""
        path = self.swarm.run_folder(member) / RUN_METRICS
        try:
            with path.open("rb") as stream:
                stream.seek(max(0, path.stat().st_size - (1 << 16)))
                line = json.loads(stream.read().splitlines()[-1])
            return line["step"], line["loss"]
        except (OSError, ValueError, LookupError):  # not yet written, or being written
            return 0, None


def micro_batch_size(options: SwarmOptions, shape: ModelShape, device: torch.device) -> int:
    """Sequences of a member per forward pass: ``--micro-batch-size``, or what the device fits.

    It depends on the size of the device's memory, not on what is free, so that a resumed swarm
    computes the same.
    """
    if options.micro_batch_size is not None:
        return options.micro_batch_size
    tokens = TOKENS_ON_GPU if device.type == "cuda" else TOKENS_ON_CPU
    most = max(1, tokens // options.seq_length)
    divisors = [d for d in range(1, most + 1) if options.global_batch_size % d == 0]
    memory = _memory(device)[1] * USED_SHARE
    fitting = [d for d in divisors if _member_bytes(options, shape, d) <= memory]
    return max(fitting, default=1)


def members_at_once(
    options: SwarmOptions, shape: ModelShape, device: torch.device, size: int, members: int
) -> int:
    """Members to train concurrently: ``--members-at-once``, or what memory and CPU cores allow."""
    if options.members_at_once is not None:
        return options.members_at_once
    cores = len(os.sched_getaffinity(0)) // _ranks_here()
    fitting = int(_memory(device)[0] * USED_SHARE / _member_bytes(options, shape, size))
    most = MEMBERS_ON_GPU if device.type == "cuda" else cores
    return max(1, min(members, cores, most, fitting))


def _member_bytes(options: SwarmOptions, shape: ModelShape, size: int) -> int:
    """Memory of a member's process with ``size`` sequences per pass."""
    passes = options.global_batch_size // size
    setup = TrainingSetup(shape, TrainingParallelOptions(), 1, size, passes, options.bf16)
    return PROCESS_BYTES + fullest_stage(setup).total


def _memory(device: torch.device) -> Sequence[int]:
    """Free and total bytes of a rank's device, or of its part of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    return memory.available // _ranks_here(), memory.total // _ranks_here()


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
