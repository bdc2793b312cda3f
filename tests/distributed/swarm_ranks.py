"""What the processes of the swarm tests do: python swarm_ranks.py ROOT NAME ...

Each NAME is a swarm in ROOT/NAME. One that begins with "stopped" is asked for a stop once, on the
last rank alone, and then gone on with.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.distributed.swarm_cases import MIXTURES, swarm_options

STEPS_BEFORE_STOP = 3


def main() -> None:
    """Train the swarms that are named, one after the other; rank 0 writes what was found."""
    from megatron_chameleon.artifacts import Corpus
    from megatron_chameleon.methods.swarm.train import train_swarm

    root = Path(sys.argv[1])
    corpus = Corpus.load(root / "corpus")
    rank = int(os.environ.get("RANK", "0"))
    for name in sys.argv[2:]:
        arguments = (swarm_options(), corpus, MIXTURES, root / name)
        if name.startswith("stopped"):
            with asked_on_the_last_rank():
                assert train_swarm(*arguments) is None
        result = train_swarm(*arguments)
        assert result is not None
        np.save(root / f"{name}-{rank}.npy", result.losses)


def asked_on_the_last_rank() -> Any:
    """Let the last rank send itself a SIGTERM in the middle of its work."""
    from megatron_chameleon.methods.swarm.optimizer import StackedAdamW

    plain, taken = StackedAdamW.step, []

    def step(self: StackedAdamW) -> Any:
        taken.append(1)
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if is_last and len(taken) == STEPS_BEFORE_STOP:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self)

    return mock.patch.object(StackedAdamW, "step", step)


if __name__ == "__main__":
    main()
