"""DoReMi at one point of a sweep: a reference and a proxy of the same size and steps."""

from __future__ import annotations

from megatron_chameleon.methods.common.proxy_run import training_options
from megatron_chameleon.methods.common.work_dir import BY_OUTPUT
from megatron_chameleon.methods.doremi import DoremiOptions
from megatron_chameleon.methods.excess_loss.compute import compute_doremi
from megatron_chameleon.methods.excess_loss.plan import plan_doremi, recipe_of
from megatron_chameleon.methods.sweeps.points import (
    PROXIES,
    Knobs,
    PointFiles,
    SweptMethod,
    proxy_at,
    proxy_name,
    require_pretraining,
    size_and_steps,
    watched_files,
    watched_options,
)
from megatron_chameleon.options.doremi import DoremiRule
from megatron_chameleon.options.sweep import SweepOptions
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.training.stopping import StopRequests


def files_of(options: SweepOptions, knobs: Knobs) -> PointFiles:
    """The two runs and the mixture. A reference has the name of the proxy that it is to Chameleon.

    Both are trained by uniform weights alone, so that a sweep of the other method in the same
    folder uses it.
    """
    reference = options.output / PROXIES / proxy_name(options, knobs)
    rule, default = recipe_of(options.doremi), recipe_of(DoremiRule())
    return watched_files(options, knobs, rule, default, made_before=[reference])


def reference_run(options: SweepOptions, knobs: Knobs) -> PretrainOptions:
    """The run of the reference."""
    run_dir = files_of(options, knobs).made_from[0]
    return training_options(proxy_at(options, knobs), options.corpus, run_dir)


def mixture_options(options: SweepOptions, knobs: Knobs) -> DoremiOptions:
    """What finds the weights, the reference apart."""
    shared = watched_options(options, knobs, files_of(options, knobs))
    return DoremiOptions(rule=options.doremi, **shared)


def check(options: SweepOptions, knobs: Knobs) -> None:
    """Raises UserError for what would end the point after the reference has been trained."""
    require_pretraining(options, "DoReMi")
    plan_doremi(mixture_options(options, knobs), reference_run(options, knobs), BY_OUTPUT)


def compute(options: SweepOptions, knobs: Knobs, stops: StopRequests) -> bool:
    """Train what is not there yet, and write the weights."""
    wanted, reference = mixture_options(options, knobs), reference_run(options, knobs)
    return compute_doremi(wanted, stops, reference, BY_OUTPUT)


DOREMI = SweptMethod(
    centre=size_and_steps, check=check, compute=compute, files=files_of, groups=("doremi",)
)
