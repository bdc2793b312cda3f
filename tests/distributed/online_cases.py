"""Runs whose weights follow the model, under layouts that cut model and batch in every way."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.options.data import DataOptions
from megatron_chameleon.options.online import OnlineOptions
from megatron_chameleon.options.training import PretrainOptions
from tests.distributed.layout_cases import (
    DP2,
    DP2_SHARDED_OVERLAPPED,
    ONE,
    PP2,
    SP2,
    TP2,
    VPP2,
    Case,
    Places,
    training_options,
)

ONLINE = {
    "online-one": ONE,
    "online-tp2": TP2,
    "online-sp2": SP2,
    "online-pp2": PP2,
    "online-vpp2": VPP2,
    "online-dp2": DP2,
    # One batch of windows a domain: the second rank has none, and may not be waited for.
    "online-dp2-sharded-overlapped": dataclasses.replace(
        DP2_SHARDED_OVERLAPPED, micro_batch_size=4
    ),
}
"""Name of the run -> its layout."""

ONLINE_AGAIN = {"online-one-to-pp2": ("online-one", PP2)}
"""A run that goes on from the middle of another: name -> (that run, the layout)."""

ONLINE_LAYER = 3
"""Of the last pipeline stage, and of the first one's second turn where stages are interleaved."""
INTERVAL = 4


def online_options(places: Places, name: str, case: Case) -> PretrainOptions:
    """Windows that no two ranks or batches divide evenly; new weights before steps 5 and 9."""
    return dataclasses.replace(
        training_options(places, name, case),
        data=DataOptions(permutation="epoch"),
        online=OnlineOptions(
            online_interval=INTERVAL,
            online_windows=3,
            online_layer=ONLINE_LAYER,
            online_recipe="scaled",
        ),
    )
