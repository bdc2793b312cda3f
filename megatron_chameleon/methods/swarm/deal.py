"""Which rank trains which members together."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_chameleon.artifacts.swarm import finished_members
from megatron_chameleon.methods.swarm.checkpoint import GroupState, read_state
from megatron_chameleon.methods.swarm.folder import checkpoint_folder
from megatron_chameleon.methods.swarm.memory import PassSize
from megatron_chameleon.methods.swarm.plan import SwarmPlan


@dataclasses.dataclass(frozen=True)
class Job:
    """Members that one rank trains together.

    Attributes:
        path: of their checkpoint.
        members: their numbers.
        micro_batch_size: sequences of each in a pass.
        step: steps taken; from 1 on there is a checkpoint.
        steps_left: to the last one.
    """

    path: Path
    members: tuple[int, ...]
    micro_batch_size: int
    step: int
    steps_left: int

    @property
    def work(self) -> int:
        """Steps of members that are left."""
        return self.steps_left * len(self.members)


def plan_jobs(plan: SwarmPlan, folder: Path, size: PassSize, num_ranks: int) -> list[list[Job]]:
    """The jobs of each rank: what is in flight goes on, then what has not begun.

    Raises:
        UserError: for a damaged file in ``folder``.
    """
    train_iters = plan.options.train_iters
    in_flight = _in_flight(folder)
    jobs = [_job(path, state, train_iters) for path, state in in_flight]
    begun = {member for _, state in in_flight for member in state.members}
    finished = finished_members(folder, len(plan.mixtures))
    waiting = [i for i in range(len(plan.mixtures)) if i not in finished and i not in begun]
    for members in even_groups(waiting, size.members, num_ranks):
        path = checkpoint_folder(folder) / f"{members[0]:05d}.safetensors"
        jobs.append(Job(path, tuple(members), size.micro_batch_size, 0, train_iters))
    return dealt(jobs, num_ranks)


def even_groups(members: Sequence[int], at_once: int, num_ranks: int) -> list[list[int]]:
    """``members`` in groups of at most ``at_once``, in as few rounds of all ranks as can be.

    Groups are as equal as can be, so that no rank waits long for another at the end.
    """
    rounds = math.ceil(len(members) / (at_once * num_ranks))
    count = min(len(members), rounds * num_ranks)
    bounds = [len(members) * number // count for number in range(count + 1)] if count else [0]
    return [list(members[a:b]) for a, b in itertools.pairwise(bounds)]


def dealt(jobs: Sequence[Job], num_ranks: int) -> list[list[Job]]:
    """The jobs of each rank: the longest first, each to the rank that has least to do."""
    hands: list[list[Job]] = [[] for _ in range(num_ranks)]
    for job in sorted(jobs, key=lambda job: (-job.work, job.members)):
        min(hands, key=lambda hand: sum(other.work for other in hand)).append(job)
    return hands


def _in_flight(folder: Path) -> list[tuple[Path, GroupState]]:
    paths = sorted(checkpoint_folder(folder).glob("[0-9]*.safetensors"))
    return [(path, read_state(path)) for path in paths]


def _job(path: Path, state: GroupState, train_iters: int) -> Job:
    return Job(
        path, tuple(state.members), state.micro_batch_size, state.step, train_iters - state.step
    )
