"""What the ranks of a run do that a hook watches; see hooked_cases.py."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.options.data import DataOptions
from tests.distributed.hooked_cases import HOOKED, HOOKED_AGAIN
from tests.distributed.layout_cases import SAVE_INTERVAL, Case, Places, training_options


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
    from megatron_chameleon.training.loop import pretrain
    from tests.distributed.toy_hooks import HOOKS

    options = dataclasses.replace(
        training_options(places, name, case), data=DataOptions(permutation=case.permutation)
    )
    pretrain(options, HOOKS[hook])
