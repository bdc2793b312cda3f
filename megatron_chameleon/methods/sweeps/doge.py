"""DoGE at one point of a sweep: a proxy whose gradients are weighed, towards all domains."""

from __future__ import annotations

from megatron_chameleon.methods.common.proxy_run import BY_OUTPUT
from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.methods.gradient_alignment.compute import compute_doge
from megatron_chameleon.methods.gradient_alignment.plan import MU, PROXY, plan_doge, recipe_of
from megatron_chameleon.methods.sweeps.points import (
    MIXTURES,
    PROXIES,
    Knobs,
    PointFiles,
    SweptMethod,
    proxy_at,
    require_pretraining,
    size_and_steps,
    watched_name,
)
from megatron_chameleon.options.doge import DogeRule
from megatron_chameleon.options.sweep import SweepOptions
from megatron_chameleon.training.stopping import StopRequests


def files_of(options: SweepOptions, knobs: Knobs) -> PointFiles:
    """The proxy's run and the mixture."""
    rule, default = recipe_of(options.doge, MU), recipe_of(DogeRule(), MU)
    name = watched_name(options, knobs, rule, default)
    return PointFiles(
        mixture=options.output / MIXTURES / f"{name}.json",
        made_from=(options.output / PROXIES / name / PROXY,),
    )


def mixture_options(options: SweepOptions, knobs: Knobs) -> DogeOptions:
    """What finds the weights."""
    files = files_of(options, knobs)
    return DogeOptions(
        corpus=options.corpus,
        output=files.mixture,
        work_dir=files.made_from[0].parent,
        rule=options.doge,
        proxy=proxy_at(options, knobs),
    )


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
