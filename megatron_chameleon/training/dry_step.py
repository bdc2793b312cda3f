"""A first step that leaves no trace: a run that is too large for its devices ends before it begins.

Memory is the highest in the second step of a run, whose passes find the optimizer's moments beside
them. The dry step makes the moments first, and then goes through a whole step up to the update.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_chameleon.blend.boundaries import DocumentBoundaries
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.checkpoint.state import random_states, set_random_states
from megatron_chameleon.errors import UserError
from megatron_chameleon.host_memory import require_host_memory
from megatron_chameleon.model.activation_memory import chunks_in_flight
from megatron_chameleon.model.memory import TrainingSetup, fullest_stage
from megatron_chameleon.model.memory_advice import (
    describe_out_of_memory,
    remedies_line,
    training_setup,
)
from megatron_chameleon.options.training import DryFirstStep
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.guards import GuardedOptimizer
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.trained_model import TrainedModel

# Of megatron's bucket groups.
BOOKKEEPING = ("is_first_batch", "golden_per_param_grad_ready_counts", "param_gather_dispatched")


def is_wanted(choice: DryFirstStep, device: torch.device) -> bool:
    """Whether a run on ``device`` begins with a dry step."""
    return choice == "on" or (choice == "auto" and device.type == "cuda")


@contextlib.contextmanager
def told_out_of_memory(
    plan: TrainingPlan, layout: Layout, hook: TrainingHook | None = None
) -> Iterator[None]:
    """Say what helps where the device's memory does not suffice for the block.

    Args:
        plan: of the run.
        layout: of the ranks.
        hook: that watches the run, which may hold memory too.

    Raises:
        UserError: with the two flags most likely to help, on the rank that ran out.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:

        def beside(setup: TrainingSetup, stage: int) -> dict[str, int]:
            return hook.extra_bytes(setup, stage, len(plan.data.names)) if hook else {}

        advice = describe_out_of_memory(plan.options, plan.shape, layout, beside)
        raise UserError(advice) from error


def check_host_memory(plan: TrainingPlan, layout: Layout) -> None:
    """Check that the host can hold what its ranks take, where they train on the CPU.

    Raises:
        UserError: if the machine is too small, with the two flags most likely to help.
    """
    if layout.device.type != "cpu":
        return
    setup = training_setup(plan.options, plan.shape, layout.world_size)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    require_host_memory(
        ranks * fullest_stage(setup).total,
        f"training on {ranks} rank(s) of this machine",
        remedies_line(setup),
    )


def dry_first_step(plan: TrainingPlan, layout: Layout, model: TrainedModel) -> None:
    """Take the memory of a step as training does, and give it back. Every rank calls this.

    Afterwards weights, gradients, optimizer, schedule and random states are as they were, whether
    the model is new or comes from a checkpoint. What a hook holds is there by now; its own passes
    are forward only and take less, and are not tried.

    Raises:
        torch.OutOfMemoryError: if the device has not enough memory.
    """
    setup = training_setup(plan.options, plan.shape, layout.world_size)
    count = microbatches_to_peak(setup)
    with (
        _same_random_states(),
        _clean_gradients(model.chunks, model.optimizer),
        _moments(model.optimizer),
        _no_update(model.optimizer),
    ):
        model.passes.forward_backward(_random_batches(plan, count), count)
        model.optimizer.step()


def microbatches_to_peak(setup: TrainingSetup) -> int:
    """The fewest micro-batches whose passes hold as much as those of a whole step."""
    parallel = setup.parallel
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    # The first stage has most chunks in flight. Interleaved stages take whole rounds.
    needed = -(-chunks_in_flight(setup, stage=0) // virtual)
    rounds = parallel.pipeline_model_parallel_size if virtual > 1 else 1
    return min(-(-needed // rounds) * rounds, setup.num_microbatches)


def _random_batches(plan: TrainingPlan, count: int) -> Iterator[Batch]:
    """Micro-batches of the shapes that the run will read, the same on every rank."""
    options = plan.options
    boundaries = DocumentBoundaries(plan.data.tokenizer.eod_id, options.boundaries)
    generator = torch.Generator().manual_seed(options.seed)
    rows, length = options.micro_batch_size, options.seq_length
    for _ in range(count):
        text = torch.randint(
            plan.data.tokenizer.vocab_size, (rows, length + 1), generator=generator
        )
        tokens, labels = text[:, :-1], text[:, 1:]
        domain = torch.zeros(rows, dtype=torch.int64)
        yield {"tokens": tokens, "labels": labels, **boundaries(tokens), "domain": domain}


# These put things back where the block ends well. Where it does not, the run ends, and with half of
# the gradients under way there is nothing to go back to.


@contextlib.contextmanager
def _same_random_states() -> Iterator[None]:
    states = random_states()
    yield
    set_random_states(states)


@contextlib.contextmanager
def _clean_gradients(
    chunks: Sequence[DistributedDataParallel], optimizer: GuardedOptimizer
) -> Iterator[None]:
    """Begin and end without gradients, and with megatron's bookkeeping of them as it was.

    In its first batch a bucket learns how many gradients make it complete, and from the next one on
    it is sent when it is. Before each step it is noted whether parameters have been gathered.
    """
    groups = [group for chunk in chunks for group in chunk.bucket_groups]
    before = [{name: getattr(group, name) for name in BOOKKEEPING} for group in groups]
    _zero_gradients(chunks, optimizer)
    yield
    _zero_gradients(chunks, optimizer)
    for group, values in zip(groups, before, strict=True):
        vars(group).update(values)


def _zero_gradients(chunks: Sequence[DistributedDataParallel], optimizer: GuardedOptimizer) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


@contextlib.contextmanager
def _moments(optimizer: GuardedOptimizer) -> Iterator[None]:
    """Adam's moments of the parameters that have none yet, made by megatron, for the block."""
    parts = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
    before = [set(part.optimizer.state) for part in parts]
    for part in parts:
        part.init_state_fn(part.optimizer, part.config)
    yield
    for part, had in zip(parts, before, strict=True):
        for parameter in set(part.optimizer.state) - had:
            del part.optimizer.state[parameter]


@contextlib.contextmanager
def _no_update(optimizer: GuardedOptimizer) -> Iterator[None]:
    """The optimizer goes as far as it does in a step that is skipped."""
    accepts = optimizer.accepts
    optimizer.accepts = lambda _grad_norm: False
    yield
    optimizer.accepts = accepts
