"""megatron's pipeline schedules cannot deadlock, by the order of their sends and receives.

Over NCCL a send completes when the matching receive has started, and operations on a communicator
run in order; gloo hides both. So each rank's schedule runs with its transfers recorded instead of
executed, and the records of all ranks are simulated together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_chameleon.model.gpt import transformer_config
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.parallel.cpu import install_cpu_stand_in
from megatron_chameleon.parallel.layout import Layout

# Pipeline-parallel size, virtual stages of a rank, micro-batches.
LAYOUTS = [
    *((2, 1, 4), (3, 1, 6), (4, 1, 8), (8, 1, 16)),
    *((2, 2, 4), (2, 3, 8), (3, 2, 6), (4, 2, 4), (4, 2, 8), (4, 3, 12), (8, 2, 8), (8, 2, 16)),
]
# How NCCL's communicators are made: one for a process group (init_process_group with a device_id),
# one for each pair of ranks (without), or the first, with a single hardware queue: nothing begins
# before all that was launched earlier has begun (CUDA_DEVICE_MAX_CONNECTIONS=1 at its strictest).
COMMUNICATORS = ("group", "pair", "one queue")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A send or a receive that a rank launches."""

    group: str
    is_send: bool
    peer: int


@dataclasses.dataclass(frozen=True)
class Compute:
    """Work of the computing stream: a pass, or a wait for the transfer at place ``waits_for``."""

    waits_for: int | None = None


Event = Transfer | Compute


@dataclasses.dataclass(frozen=True)
class Group:
    """As much of a process group as schedules ask for."""

    name: str
    own_rank: int
    num_ranks: int

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.num_ranks


@contextlib.contextmanager
def recording(events: list[Event], world: Group) -> Iterator[None]:
    """megatron's transfers and passes append to ``events``, and do nothing else."""

    def transfer(is_send, group, peer):
        place = len(events)
        events.append(Transfer(group.name, is_send, peer))
        return types.SimpleNamespace(wait=lambda: events.append(Compute(waits_for=place)))

    def forward_step(*_arguments, **_more):
        events.append(Compute())
        return torch.zeros(1), torch.tensor(0)

    def backward_step(*_arguments, **_more):
        events.append(Compute())
        return torch.zeros(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "forward_step", forward_step)
        patch.setattr(schedules, "backward_step", backward_step)
        patch.setattr(
            schedules.parallel_state,
            "set_virtual_pipeline_model_parallel_rank",
            lambda _stage: None,
        )
        patch.setattr(dist, "isend", lambda tensor, dst, group: transfer(True, group, dst))
        patch.setattr(dist, "irecv", lambda tensor, src, group: transfer(False, group, src))
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_backend", lambda _group=None: "nccl")
        patch.setattr(dist, "get_global_rank", lambda _group, rank: rank)
        patch.setattr(dist, "group", types.SimpleNamespace(WORLD=world))
        yield


def record(rank: int, pipeline: int, virtual: int, micro_batches: int) -> list[Event]:
    """What the schedule of one rank does in a step, in the order of its host."""
    install_cpu_stand_in()
    layout = Layout(
        rank=rank,
        world_size=pipeline,
        tensor_rank=0,
        tensor_size=1,
        pipeline_rank=rank,
        pipeline_size=pipeline,
        data_rank=0,
        data_size=1,
        sequence_parallel=False,
        use_distributed_optimizer=False,
        device=torch.device("cpu"),
        virtual_size=virtual,
    )
    shape = ModelShape(ModelSize(pipeline * virtual, 2, 8, 16), 64, max_sequence_length=4)
    config = transformer_config(shape, layout, bf16=False)
    config.deallocate_pipeline_outputs = False  # the passes here return no views
    config.finalize_model_grads_func = None
    chunks: list[Any] = [torch.nn.Linear(1, 1) for _ in range(virtual)]
    for chunk in chunks:
        chunk.config, chunk.model_type = config, None
        chunk.set_input_tensor = lambda _tensor: None
    stages, alone = Group("pipeline", rank, pipeline), Group("alone", 0, 1)
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = groups.dp_cp = alone
    groups.embd = groups.pos_embd = None
    groups.pp = stages
    run: Any = schedules.forward_backward_pipelining_without_interleaving
    model: Any = chunks[0]
    if virtual > 1:
        run, model = schedules.forward_backward_pipelining_with_interleaving, chunks
    events: list[Event] = []
    with recording(events, Group("world", rank, pipeline)):
        run(
            forward_step_func=None,
            data_iterator=[iter(())] * virtual if virtual > 1 else iter(()),
            model=model,
            num_microbatches=micro_batches,
            seq_length=4,
            micro_batch_size=1,
            forward_only=False,
            p2p_communicator=p2p_communication.P2PCommunicator(stages, config),
            pg_collection=groups,
        )
    return events


class Player:
    """Ranks whose events begin and end as soon as they can.

    Args:
        ranks: events of each, in the order of its host. The n-th send to a rank in a group meets
            the n-th receive there.
        communicators: of :data:`COMMUNICATORS`.
    """

    def __init__(self, ranks: Sequence[Sequence[Event]], communicators: str) -> None:
        self._ranks, self._communicators = ranks, communicators
        self._begun: list[set[int]] = [set() for _ in ranks]  # transfers, by their places
        self._ended: list[set[int]] = [set() for _ in ranks]
        self._first = [0] * len(ranks)  # what is before has ended
        self._met_by = _pairs(ranks)

    def stuck(self) -> dict[int, Event]:
        """Play to the end: rank -> the first of its events that never ends."""
        moving = True
        while moving:
            moving = any(self._advance(rank) for rank in range(len(self._ranks)))
        places = enumerate(zip(self._ranks, self._first, strict=True))
        return {rank: events[first] for rank, (events, first) in places if first < len(events)}

    def _advance(self, rank: int) -> bool:
        """Begin and end what can of one rank; whether there was anything."""
        events, begun, ended = self._ranks[rank], self._begun[rank], self._ended[rank]
        before = len(begun) + len(ended)
        busy: set[tuple[str, int]] = set()  # communicators whose turn is an earlier transfer's
        queued = False  # behind a transfer that has not begun, in the one queue of the device
        for place in range(self._first[rank], len(events)):
            event = events[place]
            if place in ended:
                continue
            if isinstance(event, Compute):
                if queued or not (event.waits_for is None or event.waits_for in ended):
                    break  # what is launched later waits for the computing stream
                ended.add(place)
                continue
            communicator = (event.group, event.peer if self._communicators == "pair" else 0)
            if communicator not in busy and not queued:
                begun.add(place)
                self._end_if_met(rank, place, event.peer)
            if place not in ended:
                busy.add(communicator)
                queued |= self._communicators == "one queue" and place not in begun
        while self._first[rank] in ended:
            self._first[rank] += 1
        return len(begun) + len(ended) > before

    def _end_if_met(self, rank: int, place: int, peer: int) -> None:
        other = self._met_by.get((rank, place))
        if other in self._begun[peer]:
            self._ended[rank].add(place)
            self._ended[peer].add(other)


def _pairs(ranks: Sequence[Sequence[Event]]) -> dict[tuple[int, int], int]:
    """(rank, place of a transfer) -> place of the transfer that it meets, among the peer's."""
    places: dict[tuple[str, int, int, bool], list[int]] = {}
    for rank, events in enumerate(ranks):
        for place, event in enumerate(events):
            if isinstance(event, Transfer):
                ends = (rank, event.peer) if event.is_send else (event.peer, rank)
                places.setdefault((event.group, *ends, event.is_send), []).append(place)
    found = {}
    for (group, source, target, is_send), sends in places.items():
        receives = places.get((group, source, target, False), [])
        for send, receive in zip(sends, receives, strict=False) if is_send else ():
            found[source, send], found[target, receive] = receive, send
    return found


@pytest.mark.parametrize(("pipeline", "virtual", "micro_batches"), LAYOUTS)
def test_no_schedule_deadlocks(pipeline, virtual, micro_batches):
    ranks = [record(rank, pipeline, virtual, micro_batches) for rank in range(pipeline)]
    passes = [e for events in ranks for e in events if e == Compute()]
    assert len(passes) == 2 * pipeline * virtual * micro_batches
    for communicators in COMMUNICATORS:
        assert not Player(ranks, communicators).stuck(), communicators


def events_of(text):
    """Events of a rank: "1>" sends to 1, "<1" receives from it, "." waits for the first event."""
    return [
        Compute(0)
        if word == "."
        else Transfer("h" if "h" in word else "g", ">" in word, int(word.strip("<>h")))
        for word in text.split()
    ]


@pytest.mark.parametrize(
    ("ranks", "stuck_with"),
    [
        # Both send before they receive.
        (["1> <1", "0> <0"], {"group", "pair", "one queue"}),
        (["1> <1", "<0 0>"], set()),
        # In two groups the two do not wait for each other,
        (["1> <1h", "0>h <0"], set()),
        # unless the host waits between them.
        (["1> . <1h", "0>h . <0"], {"group", "pair", "one queue"}),
        # Each of three sends to the next: pairs have communicators of their own.
        (["1> <2", "2> <0", "0> <1"], {"group", "one queue"}),
        # A transfer in another group is queued behind one that cannot begin yet.
        (["1> 1> <1h", "0>h . <0 <0"], {"one queue"}),
        # One side sends once more than the other receives.
        (["1> 1>", "<0"], {"group", "pair", "one queue"}),
    ],
)
def test_deadlocks_are_found(ranks, stuck_with):
    ranks = [events_of(text) for text in ranks]
    assert {c for c in COMMUNICATORS if Player(ranks, c).stuck()} == stuck_with
