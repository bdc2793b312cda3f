"""Worker process of a swarm: ``python -m megatron_chameleon.methods.swarm.member``.

It reads pickled members from standard input and trains one after the other, each as a run of
tools/pretrain_gpt.py, until it reads None. Exit status: 0, 2 after a user's mistake (the last line
of the member's log), or STOPPED_STATUS after a signal, with the member's checkpoint saved.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import queue
import shutil
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.training.options import PretrainOptions, StoppingOptions
from megatron_chameleon.training.stopping import StopRequests

LOG_NAME = "log.txt"


@dataclasses.dataclass(frozen=True)
class Member:
    """One member to train.

    Attributes:
        number: of the member.
        swarm: the swarm's folder, which gets the result.
        run: options of its run.
        weights: domain -> weight.
        steps: after which held-out losses are read.
        max_loss: held-out loss above which it counts as diverged; nats per token.
        num_ranks: ranks of the swarm.
        per_device: members trained concurrently on the device, which divide its time.
    """

    number: int
    swarm: Path
    run: PretrainOptions
    weights: dict[str, float]
    steps: list[int]
    max_loss: float
    num_ranks: int
    per_device: int


def main() -> int:
    """Train the members that arrive on standard input; the exit status."""
    stops = StopRequests(StoppingOptions())
    stops.install_handlers()  # before torch is imported, which takes seconds
    members: queue.Queue[Member | None] = queue.Queue()
    threading.Thread(target=_read_members, args=(members,), daemon=True).start()
    while (member := members.get()) is not None:
        if not train_member(member, stops):
            return STOPPED_STATUS
    return 0


def train_member(member: Member, stops: StopRequests) -> bool:
    """Train or resume a member and write its result; False if it was asked to stop before.

    Raises:
        UserError: as training would; a member that diverged raises none.
    """
    from megatron_chameleon.artifacts import Mixture, TrainingRun
    from megatron_chameleon.artifacts.checkpoint import FOLDER_NAME
    from megatron_chameleon.artifacts.provenance import Cost
    from megatron_chameleon.artifacts.swarm import MemberRecord, member_path
    from megatron_chameleon.training.trainer import pretrain

    folder = member.run.run_dir
    Mixture(member.weights, method="swarm").save(Path(str(member.run.mixture)))
    try:
        pretrain(member.run, stops=stops)
    except UserError:
        if not _skipped_step(folder):
            raise
    run = TrainingRun.load(folder) if TrainingRun.exists(folder) else None
    if run is None or run.status == "interrupted":
        return False
    losses, diverged = held_out_losses(member)
    share = member.per_device
    MemberRecord(
        member=member.number,
        steps=member.steps[: len(losses)],
        losses=losses,
        diverged=diverged,
        cost=Cost(
            run.cost.flops,
            run.cost.device_seconds / share,
            run.cost.wall_seconds / (share * member.num_ranks),
            member.num_ranks,
        ),
    ).save(member_path(member.swarm, member.number))
    shutil.rmtree(folder / FOLDER_NAME, ignore_errors=True)
    dataclasses.replace(run, checkpoints=[]).save()
    return True


def held_out_losses(member: Member) -> tuple[list[list[float | None]], str | None]:
    """Losses at each measured step [steps, k], None where not measured; and why it diverged."""
    lines = {line["step"]: line for line in _metrics(member.run.run_dir)}
    losses: list[list[float | None]] = []
    skipped = _skipped_step(member.run.run_dir)
    for step in member.steps:
        measured = lines.get(step, {}).get("validation_loss")
        if measured is None or (skipped is not None and step >= skipped):
            return losses, f"its loss or gradient was not finite in step {skipped}"
        losses.append([measured.get(name) for name in member.weights])
        own = own_loss(measured, member.weights)
        if not own <= member.max_loss:
            return losses, (
                f"its held-out loss was {own:.4g} after step {step}, above {member.max_loss:.4g}"
            )
    return losses, None


def own_loss(losses: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """Mean of a member's held-out losses weighted by its own mixture; NaN if one of them is.

    A member may know nothing of a domain that it is not trained on. If none of its own domains is
    measured, the mean is over the others.
    """
    shares = {name: weights[name] for name in losses}
    if not any(shares.values()):
        shares = dict.fromkeys(losses, 1.0)
    terms = [
        weight * (math.nan if (loss := losses[name]) is None else loss)
        for name, weight in shares.items()
        if weight
    ]
    return math.fsum(terms) / math.fsum(shares.values())


def _skipped_step(folder: Path) -> int | None:
    """First step of a run whose loss or gradient was not finite, if any."""
    steps = (skipped["step"] for line in _metrics(folder) for skipped in line.get("skipped", ()))
    return next(steps, None)


def _metrics(folder: Path) -> Sequence[dict[str, Any]]:
    from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics

    return list(read_metrics(folder / METRICS_NAME))


def _read_members(members: queue.Queue[Member | None]) -> None:
    """Pass on members from standard input; end the process if the one that started it is gone."""
    while True:
        try:
            member = pickle.load(sys.stdin.buffer)
        except (EOFError, pickle.UnpicklingError):
            os._exit(1)  # as by kill -9: checkpoints are written for that
        if member is not None:
            _log_to(member.run.run_dir / LOG_NAME)
        members.put(member)
        if member is None:
            return


def _log_to(path: Path) -> None:
    """Append everything printed from now on to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)


if __name__ == "__main__":
    try:
        status = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a thread still reads standard input, and would abort the shutdown
