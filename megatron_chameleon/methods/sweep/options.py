"""Options of sweep_mixture, with those of all methods that it can sweep."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import tyro

from megatron_chameleon.methods.method import find_declared
from megatron_chameleon.methods.sweep import ProxyAxes, SharedSweepOptions, SweptMethod

_METHODS = find_declared("SWEEP", SweptMethod)
AxisOptions: Any = dataclasses.make_dataclass(
    "AxisOptions",
    [
        (
            f"sweep_{name}",
            Annotated[axis.type | None, tyro.conf.arg(help=axis.help)],
            None,
        )
        for method in _METHODS.values()
        for name, axis in method.axes.items()
    ],
    bases=(ProxyAxes,),
    namespace={"__module__": __name__, "__doc__": ProxyAxes.__doc__},
    frozen=True,
)
SweepOptions: Any = dataclasses.make_dataclass(
    "SweepOptions",
    [
        (
            "method",
            Annotated[
                Literal[tuple(_METHODS)],
                tyro.conf.arg(help="The method that computes the mixtures."),
            ],
            SharedSweepOptions.method,
        ),
        ("axes", AxisOptions, dataclasses.field(default_factory=AxisOptions)),
        *(
            (name, group, dataclasses.field(default_factory=group))
            for method in _METHODS.values()
            for name, group in method.groups.items()
        ),
    ],
    bases=(SharedSweepOptions,),
    namespace={
        "METHODS": _METHODS,
        "__module__": __name__,
        "__doc__": SharedSweepOptions.__doc__,
    },
    frozen=True,
)
