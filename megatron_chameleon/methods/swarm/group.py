"""A group: members that one rank trains together, from their first step to their results."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Cost, Stopwatch
from megatron_chameleon.artifacts.swarm import MemberRecord
from megatron_chameleon.blend.prefetch import read_ahead
from megatron_chameleon.blend.token_data import TokenData
from megatron_chameleon.methods.swarm.checkpoint import (
    GroupState,
    read_state,
    read_tensors,
    save_state,
)
from megatron_chameleon.methods.swarm.deal import Job
from megatron_chameleon.methods.swarm.folder import plain_losses
from megatron_chameleon.methods.swarm.optimizer import StackedAdamW, no_moments
from megatron_chameleon.methods.swarm.plan import SwarmPlan
from megatron_chameleon.methods.swarm.samples import GroupBatches, member_samples, open_held_out
from megatron_chameleon.methods.swarm.stacked_gpt import (
    Stack,
    StackedGPT,
    initial_weights,
    parameter_shapes,
)
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.flops import forward_flops, training_flops

NEVER = 0
"""What ``_bad_steps`` holds for a member whose steps have all been finite."""


class Watcher(Protocol):
    """Whoever lets the group train."""

    def advance(self, tokens: int) -> None:
        """So many tokens have been trained on."""

    def skip(self, tokens: int) -> None:
        """So many tokens will not be."""

    def show(self, loss: float) -> None:
        """The members' mean training loss of the last step is this."""

    def say(self, line: str) -> None:
        """Tell a person."""

    def stop_is_asked(self) -> bool:
        """Whether the group has to save and leave after this step."""


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What all groups of a rank share.

    Attributes:
        plan: of the swarm.
        data: its training tokens, open.
        folder: of the swarm.
        device: of this rank.
        num_ranks: that share the swarm.
    """

    plan: SwarmPlan
    data: TokenData
    folder: Path
    device: torch.device
    num_ranks: int


class Group:
    """Trains the members of a job, and writes their results.

    Args:
        job: which members, and how far they have come.
        around: where.
        watcher: is told of the progress.
    """

    def __init__(self, job: Job, around: Surroundings, watcher: Watcher) -> None:
        self.job, self.around, self.watcher = job, around, watcher
        self.plan, self.options = around.plan, around.plan.options
        self.held_out = open_held_out(self.plan, job.micro_batch_size)
        if job.step == 0:
            self.state = first_state(job)
            self._build(first_tensors(self.plan, job.members, around.device))
        else:
            self.state = read_state(job.path)
            self._build(read_tensors(job.path, around.device))
        self.samples = {
            member: member_samples(self.plan, around.data, member) for member in self.state.members
        }

    def run(self) -> bool:
        """Train to the last step; whether it came there. If it is asked to stop, it saves first."""
        stopped = False
        while self._steps_left and self.state.members and not stopped:
            with self._counted():
                stopped = self._train_until(self._next_boundary()) and self._steps_left > 0
            self._leave_out_the_bad()
            if self.state.members and self._measures_now():
                with self._counted():
                    losses = self._measure()
                self._leave_out_the_high(losses)
            if self.state.members and self._steps_left and (stopped or self._saves_now()):
                with self._counted():
                    save_state(self.job.path, self.state, self._tensors())
        if not stopped:
            for place in range(len(self.state.members)):
                self._write(place, diverged=None)
            self.job.path.unlink(missing_ok=True)
        return not stopped

    def _train_until(self, step: int) -> bool:
        """Take the steps up to ``step``, or those until a stop is asked for; whether it was."""
        options, size = self.options, self.state.micro_batch_size
        passes = options.global_batch_size // size
        samples = [self.samples[member] for member in self.state.members]
        batches = GroupBatches(samples, options.global_batch_size, size, self.state.step)
        wanted = itertools.islice(batches, (step - self.state.step) * passes)
        sums = torch.zeros(len(self.state.members), device=self.around.device)
        with read_ahead(wanted, self.around.device) as ahead:
            while self.state.step < step:
                self.model.begin_step()
                sums.zero_()
                for batch in itertools.islice(ahead, passes):
                    scale = 1.0 / self.plan.tokens_per_step
                    sums += self.model.forward_backward(batch["tokens"], batch["labels"], scale)
                self._update(sums)
                if self.watcher.stop_is_asked():
                    return True
        self.watcher.show(sums.nanmean().item() / self.plan.tokens_per_step)
        return False

    def _update(self, losses: torch.Tensor) -> None:
        """Take the step whose losses [E] and gradients are there."""
        norms = self.optimizer.step()
        step = self.state.step + 1
        finite = torch.isfinite(losses) & torch.isfinite(norms)
        first = ~finite & (self._bad_steps == NEVER)
        self._bad_steps.masked_fill_(first, step)  # the host reads it now and then: no wait here
        of_step = training_flops(
            self.plan.shape, self.plan.tokens_per_step, self.options.seq_length
        )
        flops = [of_member + of_step for of_member in self.state.flops]
        self.state = dataclasses.replace(self.state, step=step, flops=flops)
        self.watcher.advance(self.plan.tokens_per_step * len(self.state.members))

    def _leave_out_the_bad(self) -> None:
        """Drop members one of whose steps was not finite."""
        steps = self._bad_steps.tolist()
        self._drop(
            {
                place: f"its loss or gradient was not finite in step {step}"
                for place, step in enumerate(steps)
                if step != NEVER
            }
        )

    def _measure(self) -> Array:
        """Measure held-out losses [E, k] of the weights as they are now."""
        self.model.begin_step()
        losses = self.held_out.losses(self.model, self.around.device)
        seen = forward_flops(self.plan.shape, self.held_out.num_tokens, self.options.seq_length)
        self.state = dataclasses.replace(
            self.state,
            steps=[*self.state.steps, self.state.step],
            losses=[*self.state.losses, [plain_losses(row) for row in losses]],
            flops=[of_member + seen for of_member in self.state.flops],
        )
        return losses

    def _leave_out_the_high(self, losses: Array) -> None:
        """Drop members whose own held-out loss, of ``losses`` [E, k], is too high or no number."""
        mixtures, most = self.plan.mixtures[self.state.members], self.plan.max_loss
        own = own_losses(losses, mixtures, self.held_out.measured)
        self._drop(
            {
                place: f"its held-out loss was {loss:.4g} after step {self.state.step}, "
                f"and at most {most:.4g} is allowed"
                for place, loss in enumerate(own.tolist())
                if not loss <= most
            }
        )

    def _drop(self, reasons: Mapping[int, str]) -> None:
        """Write down that the members at these places diverged, and go on without them."""
        if not reasons:
            return
        for place, reason in reasons.items():
            self._write(place, diverged=reason)
            member = self.state.members[place]
            self.watcher.say(f"member {member} has diverged and is left out: {reason}")
        self.watcher.skip(len(reasons) * self._steps_left * self.plan.tokens_per_step)
        kept = [place for place in range(len(self.state.members)) if place not in reasons]
        self.state = _of_places(self.state, kept)
        if kept:
            self._build({name: part[kept] for name, part in self._tensors().items()})

    def _build(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Model and optimizer of ``tensors`` [E, ...], which are as of :meth:`_tensors`."""
        plan, step = self.plan, self.state.step
        # In their own order, which no file keeps: norms are summed up in it.
        weights = {name: tensors[name] for name in parameter_shapes(plan.shape)}
        self.model = StackedGPT(plan.shape, weights, bf16=self.options.bf16)
        self.optimizer = StackedAdamW(
            self.model.weights, self.options.optimizer, self.options.train_iters, step, tensors
        )
        count = len(self.state.members)
        self._bad_steps = torch.full((count,), NEVER, device=self.around.device)

    def _tensors(self) -> Stack:
        """Name -> [E, ...]: weights, and both moments of each."""
        weights = {name: part.detach() for name, part in self.model.weights.items()}
        return {**weights, **self.optimizer.moments()}

    def _write(self, place: int, diverged: str | None) -> None:
        """Write the result of the member at ``place``."""
        state, ranks = self.state, self.around.num_ranks
        seconds = state.seconds[place]
        record = MemberRecord(
            member=state.members[place],
            steps=state.steps,
            losses=[of_members[place] for of_members in state.losses],
            diverged=diverged,
            cost=Cost(state.flops[place], seconds, seconds / ranks, ranks),
        )
        record.save(self.around.folder)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Share the seconds of the block among the members."""
        watch = Stopwatch()
        yield
        each = watch.seconds() / len(self.state.members)
        seconds = [before + each for before in self.state.seconds]
        self.state = dataclasses.replace(self.state, seconds=seconds)

    @property
    def _steps_left(self) -> int:
        return self.options.train_iters - self.state.step

    def _next_boundary(self) -> int:
        """The next step after which there is more to do than the step after it."""
        intervals = [self.options.log_interval, *self._intervals()]
        step = self.state.step
        ends = [step - step % interval + interval for interval in intervals]
        return min(self.options.train_iters, *ends)

    def _intervals(self) -> list[int]:
        return [n for n in (self.options.eval_interval, self.options.save_interval) if n]

    def _measures_now(self) -> bool:
        interval, step = self.options.eval_interval, self.state.step
        return step == self.options.train_iters or (interval > 0 and step % interval == 0)

    def _saves_now(self) -> bool:
        interval, step = self.options.save_interval, self.state.step
        return interval > 0 and step % interval == 0 and step < self.options.train_iters


def first_state(job: Job) -> GroupState:
    """Before the first step."""
    none = [0.0] * len(job.members)
    return GroupState(0, list(job.members), job.micro_batch_size, [], [], none, none)


def first_tensors(plan: SwarmPlan, members: Sequence[int], device: torch.device) -> Stack:
    """Weights and moments before the first step of ``members``."""
    seeds = [plan.member_seed(member) for member in members]
    weights = initial_weights(plan.shape, seeds, device)
    return {**weights, **no_moments(weights)}


def own_losses(losses: Array, mixtures: Array, measured: NDArray[np.bool_]) -> Array:
    """[E] of each member, the mean of its held-out losses weighted by its own mixture.

    A member may be right to know nothing of a domain that it is not trained on, but not of these.

    Args:
        losses: [E, k].
        mixtures: [E, k].
        measured: [k], whether a domain has held-out text.
    """
    weights = mixtures * measured
    weights[weights.sum(1) == 0] = measured  # other domains than its own have to tell
    found: Array = (weights * np.where(measured, losses, 0.0)).sum(1) / weights.sum(1)
    return found


def _of_places(state: GroupState, kept: Sequence[int]) -> GroupState:
    """The state of the members at the places ``kept``."""
    return dataclasses.replace(
        state,
        members=[state.members[i] for i in kept],
        losses=[[of_members[i] for i in kept] for of_members in state.losses],
        flops=[state.flops[i] for i in kept],
        seconds=[state.seconds[i] for i in kept],
    )
