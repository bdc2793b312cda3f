"""Runs whose saves are disturbed: one rank's disk is full, or one rank is killed."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.options.checkpointing import CheckpointingOptions
from megatron_chameleon.options.training import PretrainOptions
from tests.distributed.layout_cases import DP2_SHARDED, TP2, Case, Places, training_options

SAVING_INTERVAL = 3
FULL_FROM, FULL_UNTIL = 6, 9
"""One rank cannot write from before the first step until before the second: one save fails."""
KILLED_RANK = 1
KILLS_ITSELF = f"rank {KILLED_RANK} kills itself"
SMALLER_THAN_WEIGHTS = 50_000


@dataclasses.dataclass(frozen=True)
class SavingCase:
    """The uninterrupted run of the same layout, and how this one saves."""

    origin: str
    case: Case
    async_save: bool
    full_rank: int | None = None
    """The rank on which the disk is full for a while."""


SAVING = {
    "dp2-sharded-async": SavingCase("dp2-sharded", DP2_SHARDED, async_save=True),
    "dp2-sharded-full": SavingCase("dp2-sharded", DP2_SHARDED, async_save=False, full_rank=1),
    "dp2-sharded-async-full": SavingCase("dp2-sharded", DP2_SHARDED, async_save=True, full_rank=1),
    "tp2-full": SavingCase("tp2", TP2, async_save=False, full_rank=0),
}


def saving_options(places: Places, name: str, *, async_save: bool) -> PretrainOptions:
    case = SAVING[name].case if name in SAVING else DP2_SHARDED
    return dataclasses.replace(
        training_options(places, name, case),
        save_interval=SAVING_INTERVAL,
        checkpointing=CheckpointingOptions(async_save=async_save, keep_last_checkpoints=3),
    )
