"""What two ranks agree on, told by each of them; the tests compare what they say."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_chameleon.errors import UserError
from megatron_chameleon.options.data import DataOptions
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.parallel.layout import Layout, distributed, from_main
from megatron_chameleon.training.agreement import StepAgreement
from megatron_chameleon.training.metrics import memory_bytes, most_memory_bytes
from megatron_chameleon.training.pretrain import verify_corpus

NUM_RANKS = 2
TIMEOUT_MINUTES = 3
MORE_BYTES = 256 << 20
LATER_GROUPS = 4


def findings(root: Path, layout: Layout) -> dict[str, Any]:
    """What this rank is told, with much more memory taken on rank 1 than on rank 0."""
    taken = torch.ones(layout.rank * MORE_BYTES // 4)
    most, mine = most_memory_bytes(layout.device), memory_bytes(layout.device)
    del taken
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    flags = [0.0, 0.0, float(layout.rank), 1.0]
    return {
        "memory": mine,
        "most memory": most,
        "timeout": group.options._timeout.total_seconds(),
        "damage": damage(root, layout),
        "signals": StepAgreement(layout).signals(flags),
    }


def damage(root: Path, layout: Layout) -> str:
    """What a check of the corpus refuses, of which one file is damaged."""
    data = DataOptions(verify_corpus=True)
    options = PretrainOptions(run_dir=root / "run", corpus=root / "corpus", data=data)
    try:
        verify_corpus(options, layout)
    except UserError as error:
        return str(error)
    return ""


def say_in_new_groups(parallel: ParallelOptions, number: int) -> int:
    """What rank 0 says in groups that are set up where others have been taken down."""
    with distributed(parallel, seed=0) as layout:
        return from_main(lambda: 10 * number + layout.rank)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    parallel = ParallelOptions(distributed_timeout_minutes=TIMEOUT_MINUTES)
    with distributed(parallel, seed=0) as this_layout:
        told = findings(folder, this_layout)
    told["later groups"] = [say_in_new_groups(parallel, number) for number in range(LATER_GROUPS)]
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(told))
