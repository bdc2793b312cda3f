"""What the ranks of a watched run do; see watched_cases.py."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.distributed.layout_cases import Places
from tests.distributed.watched_cases import BAD_STEPS, COPIES, WATCHED, watched_options

if TYPE_CHECKING:
    import torch

    from megatron_chameleon.training.step import StepResult


def train_watched(places: Places, name: str) -> None:
    """Train, with a gradient that is not a number on the last rank alone, in two steps."""
    from megatron_chameleon.training import step
    from megatron_chameleon.training.pretrain import pretrain

    steps = itertools.count(1)
    on_last_rank = int(os.environ["RANK"]) == WATCHED[name].ranks - 1

    def train_step(model: Sequence[torch.nn.Module], *others: Any) -> StepResult:
        bad = next(steps) in BAD_STEPS and on_last_rank
        handle = poison(model[-1], is_copy=name in COPIES) if bad else None
        result = step.train_step(model, *others)
        if handle:
            handle.remove()
        return result

    with mock.patch("megatron_chameleon.training.loop.train_step", train_step):
        pretrain(watched_options(places, name))


def poison(model: torch.nn.Module, *, is_copy: bool) -> Any:
    """Spoil the gradient of a matrix, of which each rank has its own part, or a rank's copy.

    Copies are what tensor-parallel ranks hold alike; the last rank's is not the first one's.
    """
    from megatron_chameleon.model.initialization import partition_dimension

    own = [p for p in model.parameters() if p.dim() == 2]
    copies = [p for p in model.parameters() if p.dim() == 1 and partition_dimension(p) is None]
    spoiled = (copies if is_copy else own)[-1]
    return spoiled.register_hook(lambda gradient: gradient * float("nan"))
