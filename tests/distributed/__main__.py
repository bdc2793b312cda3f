"""Launch the ranks of all sections, and of all faults, forked from this process.

    python -m tests.distributed ROOT [--slow] [--faults]

This process imports the package once for all ranks, which takes longer than most launches. ROOT has
a corpus and gets the results; cases.Places lists them.
"""

from __future__ import annotations

import gc
import sys
from functools import partial
from pathlib import Path

from tests.distributed.cases import MAX_RANKS, Places
from tests.distributed.faults import launch_faults
from tests.distributed.launch import fork_ranks
from tests.distributed.ranks import run_sections


def main(places: Places, *, with_slow: bool, with_faults: bool) -> None:
    gc.freeze()  # exclude imported modules from the garbage collections of the ranks
    fork_ranks(MAX_RANKS, places.log, partial(run_sections, places, with_slow=with_slow)).join()
    if with_faults:
        launch_faults(places)


if __name__ == "__main__":
    root, *flags = sys.argv[1:]
    main(Places(Path(root)), with_slow="--slow" in flags, with_faults="--faults" in flags)
