"""Peak tensor memory of a training step, as counted by torch's CPU allocator."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._C._profiler import _EventType

if TYPE_CHECKING:
    from megatron_chameleon.model.memory import TrainingSetup
    from megatron_chameleon.parallel.layout import Layout

ALLOCATION = _EventType.Allocation
STEPS = 2  # the first step creates the optimizer's moments, so only the second has a full peak


def peak_bytes(work: Callable[[], object]) -> int:
    """Peak bytes of live CPU tensors that ``work`` allocates.

    torch's profiler records every allocation and release, but only in the thread that started it.
    Buffers sent to other ranks are sometimes released by a gloo thread. Blocks without a recorded
    release and without a live tensor are therefore ignored; otherwise, they would increase the
    result by up to 20%.
    """
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    assert profile.profiler is not None
    events = list(_with_children(profile.profiler.kineto_results.experimental_event_tree()))
    changes = _changes([event for event in events if event.tag == ALLOCATION], _held())
    return max(itertools.accumulate(changes[time] for time in sorted(changes)))


def _with_children(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _with_children(event.children)


def _held() -> set[int]:
    """Storage addresses of all live tensors."""
    addresses = set()
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):
            with contextlib.suppress(RuntimeError):  # torch.compile's fake tensors have no address
                addresses.add(found.untyped_storage().data_ptr())
    return addresses


def _changes(events: list[Any], held: set[int]) -> dict[int, int]:
    """Return a dictionary: index of each counted event -> change of allocated memory in bytes.

    Args:
        events: allocator events; a negative size is a release.
        held: addresses of the blocks that are alive at the end.
    """
    events.sort(key=lambda event: event.start_time_ns)
    changes: dict[int, int] = {}
    made: dict[int, tuple[int, int]] = {}  # address -> (index of its allocation event, size)
    for moment, block in enumerate(event.extra_fields for event in events):
        if block.alloc_size > 0:
            made[block.ptr] = moment, block.alloc_size
        elif block.ptr in made:  # blocks from before the first event are ignored
            first, size = made.pop(block.ptr)
            changes |= {first: size, moment: -size}
    return changes | dict(made[address] for address in held & made.keys())


def peak_of_training(setup: TrainingSetup, layout: Layout) -> int:
    """Peak bytes on this rank, measured from building the model to the end of the second step."""
    return peak_bytes(lambda: _train(setup, layout))


def _train(setup: TrainingSetup, layout: Layout) -> None:
    step = training_step(setup, layout)
    for _ in range(STEPS):
        step()


def training_step(setup: TrainingSetup, layout: Layout) -> Callable[[], None]:
    """Build a model and its optimizer, and return a function that trains the model for one step."""
    from tests.random_training import RandomTraining, random_batches

    rows, length = setup.micro_batch_size, setup.seq_length
    training = RandomTraining(
        setup.config,
        layout,
        bf16=setup.bf16,
        recompute=setup.parallel.recompute,
        hidden_dropout=setup.hidden_dropout,
        attention_dropout=setup.attention_dropout,
    )
    passes = training.passes(setup.num_microbatches, rows, length=length)
    batches = random_batches(setup.config.vocab_size, rows, length)

    def on_device() -> Iterator[dict[str, torch.Tensor]]:
        for batch in itertools.islice(batches, setup.num_microbatches):
            if layout.device.type == "cpu":
                yield batch
            else:
                yield {
                    name: part.pin_memory().to(layout.device, non_blocking=True)
                    for name, part in batch.items()
                }

    def step() -> None:
        training.step(lambda: passes.forward_backward(on_device()))

    return step
