"""DoGE at one point of a sweep: a proxy whose gradients are weighed, towards all domains."""

from __future__ import annotations

from megatron_chameleon.methods.common.work_dir import BY_OUTPUT
from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.methods.gradient_alignment.compute import compute_doge
from megatron_chameleon.methods.gradient_alignment.plan import MU, plan_doge, recipe_of
from megatron_chameleon.methods.sweeps.points import (
    Knobs,
    PointFiles,
    SweptMethod,
    require_pretraining,
    size_and_steps,
    watched_files,
    watched_options,
)
from megatron_chameleon.options.doge import DogeRule
from megatron_chameleon.options.sweep import SweepOptions
from megatron_chameleon.training.stopping import StopRequests


def files_of(options: SweepOptions, knobs: Knobs) -> PointFiles:
    """The proxy's run and the mixture."""
    return watched_files(options, knobs, recipe_of(options.doge, MU), recipe_of(DogeRule(), MU))


def mixture_options(options: SweepOptions, knobs: Knobs) -> DogeOptions:
    """What finds the weights."""
    shared = watched_options(options, knobs, files_of(options, knobs))
    return DogeOptions(rule=options.doge, **shared)


def check(options: SweepOptions, knobs: Knobs) -> None:
    """Raises UserError for what would end the point."""
    require_pretraining(options, "DoGE")
    plan_doge(mixture_options(options, knobs), BY_OUTPUT)


def compute(options: SweepOptions, knobs: Knobs, stops: StopRequests) -> bool:
    """Train the proxy unless it is there, and write the weights."""
    return compute_doge(mixture_options(options, knobs), stops, BY_OUTPUT)


DOGE = SweptMethod(
    centre=size_and_steps, check=check, compute=compute, files=files_of, groups=("doge",)
)
