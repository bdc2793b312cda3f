"""DoGE at one point of a sweep: a proxy whose gradients are weighed, towards all domains."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.methods.gradient_alignment.compute import compute_doge
from megatron_chameleon.methods.gradient_alignment.plan import PROXY, plan_doge
from megatron_chameleon.methods.sweeps.points import Knobs, PointFiles, SweptMethod
from megatron_chameleon.options.sweep import SweepOptions
from megatron_chameleon.training.stopping import StopRequests

PROXIES, MIXTURES = "2-proxy", "4-mixture/sweep"


def centre_of(options: SweepOptions) -> Knobs:
    """Where the options put DoGE's knobs."""
    return {"model_size": options.proxy.model_size, "train_iters": options.proxy.train_iters}


def files_of(options: SweepOptions, knobs: Knobs) -> PointFiles:
    """The proxy's run and the mixture."""
    return PointFiles(
        mixture=options.output / MIXTURES / f"{_name(options, knobs)}.json",
        made_from=(_work_dir(options, knobs) / PROXY,),
    )


def mixture_options(options: SweepOptions, knobs: Knobs) -> DogeOptions:
    """What finds the weights."""
    proxy = dataclasses.replace(
        options.proxy,
        model_size=str(knobs["model_size"]),
        train_iters=int(knobs["train_iters"]),
    )
    return DogeOptions(
        corpus=options.corpus,
        output=files_of(options, knobs).mixture,
        work_dir=_work_dir(options, knobs),
        rule=options.doge,
        proxy=proxy,
    )


def check(options: SweepOptions, knobs: Knobs) -> None:
    """Raises UserError for what would end the point."""
    if options.mode != "pretrain":
        raise UserError(
            f"--mode {options.mode}: DoGE has no weights of that kind; leave it out, or give "
            "--method chameleon"
        )
    plan_doge(mixture_options(options, knobs))


def compute(options: SweepOptions, knobs: Knobs, stops: StopRequests) -> bool:
    """Train the proxy unless it is there, and write the weights."""
    return compute_doge(mixture_options(options, knobs), stops)


def _name(options: SweepOptions, knobs: Knobs) -> str:
    seed = options.proxy.seed
    return f"doge-{knobs['model_size']}-{knobs['train_iters']}steps-seed{seed}"


def _work_dir(options: SweepOptions, knobs: Knobs) -> Path:
    return options.output / PROXIES / _name(options, knobs)


DOGE = SweptMethod(centre=centre_of, check=check, compute=compute, files=files_of, groups=("doge",))
