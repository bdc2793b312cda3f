"""What the ranks of a run do that a hook watches; see hooked_cases.py."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from megatron_chameleon.artifacts.files import write_json
from megatron_chameleon.options.data import DataOptions
from tests.distributed.hooked_cases import HOOKED, HOOKED_AGAIN
from tests.distributed.layout_cases import SAVE_INTERVAL, Case, Places, training_options

if TYPE_CHECKING:
    from megatron_chameleon.parallel.layout import Layout
    from megatron_chameleon.training.hook import TrainingHook
    from megatron_chameleon.training.plan import TrainingPlan


def train_hooked(places: Places, name: str) -> None:
    _train(places, name, *HOOKED[name])


def resume_hooked(places: Places, name: str) -> None:
    """Go on from the middle of another hooked run, in another folder and layout."""
    from tests.distributed.layout_ranks import cut_run, is_first_rank

    origin, (hook, case) = HOOKED_AGAIN[name]
    if is_first_rank():
        cut_run(places.run(origin), places.run(name), SAVE_INTERVAL)
    _train(places, name, hook, case)


def _train(places: Places, name: str, hook: str, case: Case) -> None:
    from megatron_chameleon.training.pretrain import pretrain
    from tests.distributed.toy_hooks import HOOKS

    options = dataclasses.replace(
        training_options(places, name, case), data=DataOptions(permutation=case.permutation)
    )
    hooks: list[TrainingHook] = []

    def make(plan: TrainingPlan, layout: Layout) -> TrainingHook:
        hooks.append(HOOKS[hook](plan, layout))
        return hooks[0]

    pretrain(options, make)
    folder = places.hook_flops(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{os.environ['RANK']}.json", hooks[0].flops)
