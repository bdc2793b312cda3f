"""A point of a sweep of DoReMi."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_chameleon.methods.doremi import DoremiOptions
from megatron_chameleon.methods.doremi.compute import Doremi
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.methods.sweep import Values
from megatron_chameleon.methods.sweep.sweep import (
    Point,
    fields_with_rule,
    plain_run,
    require_kept,
)
from megatron_chameleon.methods.train_proxy import PROXY, is_finished, train_proxy
from megatron_chameleon.training.checkpointing import check_run_folder
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.stopping import StopRequests


def doremi_point(options: Any, values: Values, proxy: ProxyOptions) -> Point:
    """Construct a point of a sweep: a reference, a proxy, and the mixture."""
    reference = plain_run(options, proxy)
    doremi = DoremiOptions(**fields_with_rule(options, values, proxy, options.doremi))
    with_reference = dataclasses.replace(doremi, reference=reference.run_dir)
    run, step = doremi.runs_folder / PROXY, int(values["steps"])

    def check() -> None:
        check_run_folder(plan_training(reference))
        Doremi(with_reference if is_finished(reference.run_dir) else doremi)
        require_kept(run, step)

    def compute(stops: StopRequests) -> bool:
        finished = train_proxy(reference, stops, name="DoReMi's reference")
        return finished and Doremi.compute(with_reference, stops, step)

    return Point(values, doremi.output, (reference.run_dir, run), check, compute)
