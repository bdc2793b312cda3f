"""DoReMi against the run 'one', under layouts that cut proxy, reference and batch in every way."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.methods.doremi import DoremiOptions
from megatron_chameleon.options.doremi import DoremiRule
from megatron_chameleon.options.proxy import ProxyOptions
from megatron_chameleon.options.training import DocumentBoundaryOptions
from tests.distributed.layout_cases import (
    DP2,
    DP2_SHARDED_OVERLAPPED,
    ONE,
    PP2,
    SP2,
    TP2,
    TP2_PP2,
    VPP2,
    Case,
    Places,
    training_options,
)

MASKED = DocumentBoundaryOptions(eod_mask_loss=True)


def _masked(case: Case) -> Case:
    """Micro-batches and ranks then differ in how many tokens have a loss."""
    return dataclasses.replace(case, boundaries=MASKED)


DOREMI = {
    "doremi-one": ONE,
    # The whole batch at once, where the others take it in micro-batches.
    "doremi-one-at-once": dataclasses.replace(ONE, micro_batch_size=8),
    "doremi-tp2": TP2,
    "doremi-sp2": SP2,
    "doremi-pp2": PP2,
    "doremi-vpp2": VPP2,
    "doremi-dp2": DP2,
    "doremi-dp2-sharded-overlapped": DP2_SHARDED_OVERLAPPED,
    "doremi-tp2-pp2": TP2_PP2,
    "doremi-one-masked": _masked(ONE),
    "doremi-dp2-masked": _masked(dataclasses.replace(DP2, micro_batch_size=1)),
    "doremi-tp2-pp2-masked": _masked(TP2_PP2),
    "doremi-one-fork": _masked(ONE),
    "doremi-dp2-fork": _masked(dataclasses.replace(DP2, micro_batch_size=1)),
}
"""Name -> the layout of reference and proxy."""

DOREMI_AGAIN = {"doremi-tp2-pp2-to-dp2": ("doremi-tp2-pp2", DP2)}
"""One that goes on from the middle of another's proxy: name -> (that one, the layout)."""


def plain_case(name: str) -> str:
    """The one on one rank that another has to agree with."""
    kind = name.rpartition("-")[2]
    return f"doremi-one-{kind}" if kind in ("masked", "fork") else "doremi-one"


def doremi_options(places: Places, name: str, case: Case) -> DoremiOptions:
    """The mixture goes beside the proxy's run, which has the case's name."""
    run = training_options(places, name, case)
    fields = [field.name for field in dataclasses.fields(ProxyOptions)]
    return DoremiOptions(
        corpus=places.corpus,
        output=places.run(name) / "doremi.json",
        work_dir=places.run(name),
        reference=places.run("one"),
        rule=DoremiRule("fork" if name.endswith("fork") else "original", doremi_eta=0.5),
        proxy=ProxyOptions(**{field: getattr(run, field) for field in fields}),
    )
