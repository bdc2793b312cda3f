"""The data layer, compared with megatron.core's own code and Megatron-LM's algorithm.

    python benchmarks/data.py [--only index batches build preprocess]

Prints each row and writes it, with the machine, to benchmarks/results/data.json, where it replaces
an older one. The machine should be idle otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROWS = ("index", "batches", "build", "preprocess")


def main() -> None:
    """Measure the selected rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, help="rows to run")
    only = parser.parse_args().only
    warnings.filterwarnings("ignore", message=".*not installed.*")
    from benchmarks.measure import machine, put_row

    on = machine()
    print(", ".join(f"{name} {value}" for name, value in on.items() if name != "packages"))
    for name in ROWS:
        if name in only:
            for row in importlib.import_module(f"benchmarks.data_{name}").measure():
                path = put_row("data", on, row)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
