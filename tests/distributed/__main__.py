"""Fork the ranks of all sections, and of all launches in faults.py, from this process.

    python -m tests.distributed ROOT

This process imports the package once for all ranks, which takes longer than most launches. ROOT
contains a corpus, and the results are written there; cases.Places lists the paths.
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


def main(places: Places) -> None:
    gc.freeze()  # ranks then skip imported modules in garbage collections, which saves time
    fork_ranks(MAX_RANKS, places.log, partial(run_sections, places)).join()
    launch_faults(places)


if __name__ == "__main__":
    main(Places(Path(sys.argv[1])))
