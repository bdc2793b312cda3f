"""A point of a sweep of DoGE."""

from __future__ import annotations

from typing import Any

from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.methods.doge.compute import Doge
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.methods.sweep import Values
from megatron_chameleon.methods.sweep.sweep import Point, fields_with_rule, require_kept
from megatron_chameleon.methods.train_proxy import PROXY


def doge_point(options: Any, values: Values, proxy: ProxyOptions) -> Point:
    """Construct a point of a sweep: a proxy, and the mixture."""
    doge = DogeOptions(**fields_with_rule(options, values, proxy, options.doge))
    run, step = doge.runs_folder / PROXY, int(values["steps"])

    def check() -> None:
        Doge(doge)
        require_kept(run, step)

    return Point(values, doge.output, (run,), check, lambda stops: Doge.compute(doge, stops, step))
