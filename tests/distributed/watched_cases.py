"""Runs that validate, and in which one rank's gradient is not finite for two steps."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.options.guards import GuardOptions
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.options.validation import ValidationOptions
from tests.distributed.layout_cases import RUNS, Places, training_options

COPIES = {f"{name}-copy-watched": RUNS[name] for name in ("tp2", "tp2-pp2", "tp2-dp2-sharded")}
"""Runs in which what is bad is a copy of a gradient, which the gradient's norm does not count."""

WATCHED = {
    f"{name}-watched": RUNS[name]
    for name in ("one", "tp2", "tp2-pp2", "vpp2", "dp2", "dp2-sharded-overlapped")
} | COPIES
"""Each repeats the run of its name up to its first bad step."""

EVAL_INTERVAL = 4
BAD_STEPS = (6, 7)
"""The first is one at which a checkpoint would be due."""


def plain_run(name: str) -> str:
    """The run that a watched one repeats."""
    return name.removesuffix("-watched").removesuffix("-copy")


def watched_options(places: Places, name: str) -> PretrainOptions:
    return dataclasses.replace(
        training_options(places, name, WATCHED[name]),
        guards=GuardOptions(max_consecutive_skipped_steps=3),
        validation=ValidationOptions(eval_interval=EVAL_INTERVAL, eval_iters=3),
    )
