"""Mixtures that DoGE finds under layouts that cut its proxy and the batch in every way."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.options.doge import DogeRule
from megatron_chameleon.options.proxy import ProxyOptions
from tests.distributed.layout_cases import (
    DP2,
    DP2_SHARDED_OVERLAPPED,
    ONE,
    PP2,
    TP2,
    TP2_DP2_SHARDED,
    TP2_PP2,
    VPP2,
    Case,
    Places,
    training_options,
)

DOGE: dict[str, tuple[Case, str | None]] = {
    "doge-one": (ONE, None),
    # Two micro-batches of a domain on each rank, where the others have one.
    "doge-one-small": (dataclasses.replace(ONE, micro_batch_size=1), None),
    "doge-tp2": (TP2, None),
    "doge-pp2": (PP2, None),
    "doge-dp2": (DP2, None),
    "doge-tp2-pp2": (TP2_PP2, None),
    "doge-dp2-sharded-overlapped": (DP2_SHARDED_OVERLAPPED, None),
    "doge-tp2-dp2-sharded": (TP2_DP2_SHARDED, None),
    "doge-towards-one": (ONE, "poems"),
    "doge-towards-dp2": (DP2, "poems"),
    "doge-towards-vpp2": (VPP2, "poems"),
}
"""Name of the mixture -> the layout, and the target if it is not all domains."""

DOGE_AGAIN = {"doge-one-to-tp2": ("doge-one", TP2), "doge-tp2-pp2-to-dp2": ("doge-tp2-pp2", DP2)}
"""Mixtures whose proxy goes on from the middle of another: name -> (that one, the layout)."""


def doge_options(places: Places, name: str, case: Case, target: str | None) -> DogeOptions:
    """Of the proxy that every layout repeats; it lies in ``proxy_of``."""
    training = training_options(places, name, case)
    fields = [field.name for field in dataclasses.fields(ProxyOptions)]
    shared = {field: getattr(training, field) for field in fields}
    return DogeOptions(
        corpus=places.corpus,
        output=places.run(name) / "mixture.json",
        work_dir=places.run(name),
        target=target,
        # Towards the target the alignments of so few steps are small.
        rule=DogeRule(doge_mu=0.002 if target else 0.05, doge_eps=0.01),
        proxy=ProxyOptions(**{**shared, "model_size": "nano"}),
    )


def proxy_of(places: Places, name: str) -> Path:
    """The folder of the proxy's run."""
    return places.run(name) / "proxy"
