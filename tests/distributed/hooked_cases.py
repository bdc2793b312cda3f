"""Runs that a hook watches, under layouts that cut the model and the batch in every way."""

from __future__ import annotations

import dataclasses

from tests.distributed.layout_cases import (
    DP2,
    DP2_SHARDED,
    DP2_SHARDED_OVERLAPPED,
    ONE,
    PP2,
    PP2_DP2_OVERLAPPED,
    SP2,
    TP2_DP2_SHARDED,
    TP2_PP2,
    VPP2,
    Case,
)

_LAYOUTS = {
    "weigher": {"one": ONE, "sp2": SP2, "vpp2": VPP2, "tp2-pp2": TP2_PP2, "dp2": DP2},
    "combiner": {
        "one": ONE,
        "sp2": SP2,
        "vpp2": VPP2,
        "tp2-pp2": TP2_PP2,
        "dp2": DP2,
        "dp2-sharded-overlapped": DP2_SHARDED_OVERLAPPED,
        "tp2-dp2-sharded": TP2_DP2_SHARDED,
        "pp2-dp2-overlapped": PP2_DP2_OVERLAPPED,
    },
    "changer": {"one": ONE, "pp2": PP2, "dp2-sharded": DP2_SHARDED},
}


def _case(hook: str, case: Case) -> Case:
    """Weights that a hook changes ask for an order that allows it."""
    return dataclasses.replace(case, permutation="epoch") if hook == "changer" else case


HOOKED: dict[str, tuple[str, Case]] = {
    f"{hook}-{layout}": (hook, _case(hook, case))
    for hook, layouts in _LAYOUTS.items()
    for layout, case in layouts.items()
}
"""Name of the run -> the hook and the layout."""

HOOKED_AGAIN = {
    "weigher-tp2-pp2-to-one": ("weigher-tp2-pp2", ("weigher", ONE)),
    "combiner-one-to-dp2": ("combiner-one", ("combiner", DP2)),
    "changer-one-to-dp2": ("changer-one", ("changer", _case("changer", DP2))),
}
"""Runs that go on from the middle of another: name -> (that run, the hook and the layout)."""
