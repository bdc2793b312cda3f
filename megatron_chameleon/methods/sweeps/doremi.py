"""DoReMi at one point of a sweep: a reference and a proxy of the same size and steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.proxy_run import train_proxy, training_options
from megatron_chameleon.methods.doremi import DoremiOptions
from megatron_chameleon.methods.excess_loss.compute import compute_doremi
from megatron_chameleon.methods.excess_loss.plan import PROXY, plan_doremi
from megatron_chameleon.methods.sweeps.points import Knobs, PointFiles, SweptMethod
from megatron_chameleon.options.proxy import ProxyOptions
from megatron_chameleon.options.sweep import SweepOptions
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.training.stopping import StopRequests

PROXIES, MIXTURES = "2-proxy", "4-mixture/sweep"


def centre_of(options: SweepOptions) -> Knobs:
    """Where the options put DoReMi's knobs."""
    return {"model_size": options.proxy.model_size, "train_iters": options.proxy.train_iters}


def files_of(options: SweepOptions, knobs: Knobs) -> PointFiles:
    """The two runs and the mixture. A reference has the name of the proxy that it is to Chameleon.

    Both are trained by uniform weights alone, so that a sweep of the other method in the same
    folder uses it.
    """
    name = _name(options, knobs)
    work_dir = _work_dir(options, knobs)
    return PointFiles(
        mixture=options.output / MIXTURES / f"doremi-{name}.json",
        made_from=(options.output / PROXIES / name, work_dir / PROXY),
    )


def reference_run(options: SweepOptions, knobs: Knobs) -> PretrainOptions:
    """The run of the reference."""
    return training_options(
        _proxy(options, knobs), options.corpus, files_of(options, knobs).made_from[0]
    )


def mixture_options(options: SweepOptions, knobs: Knobs, reference: Path | None) -> DoremiOptions:
    """What finds the weights with that reference."""
    return DoremiOptions(
        corpus=options.corpus,
        output=files_of(options, knobs).mixture,
        work_dir=_work_dir(options, knobs),
        reference=reference,
        rule=options.doremi,
        proxy=_proxy(options, knobs),
    )


def check(options: SweepOptions, knobs: Knobs) -> None:
    """Raises UserError for what would end the point after the reference has been trained."""
    if options.mode != "pretrain":
        raise UserError(
            f"--mode {options.mode}: DoReMi has no weights of that kind; leave it out, or give "
            "--method chameleon"
        )
    # One that it would train itself is checked as the one that is trained here.
    plan_doremi(mixture_options(options, knobs, reference=None))


def compute(options: SweepOptions, knobs: Knobs, stops: StopRequests) -> bool:
    """Train what is not there yet, and write the weights."""
    reference = reference_run(options, knobs)
    if not train_proxy(reference, stops):
        return False
    return compute_doremi(mixture_options(options, knobs, reference.run_dir), stops)


def _name(options: SweepOptions, knobs: Knobs) -> str:
    return f"{knobs['model_size']}-{knobs['train_iters']}steps-seed{options.proxy.seed}"


def _work_dir(options: SweepOptions, knobs: Knobs) -> Path:
    return options.output / PROXIES / f"doremi-{_name(options, knobs)}"


def _proxy(options: SweepOptions, knobs: Knobs) -> ProxyOptions:
    return dataclasses.replace(
        options.proxy,
        model_size=str(knobs["model_size"]),
        train_iters=int(knobs["train_iters"]),
    )


DOREMI = SweptMethod(
    centre=centre_of, check=check, compute=compute, files=files_of, groups=("doremi",)
)
