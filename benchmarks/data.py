"""All rows of the data layer, against megatron.core's own code and Megatron-LM's algorithm.

    python benchmarks/data.py [--only index batches build preprocess]

Prints a line for each row, and writes it to benchmarks/results/data.json in the place of an older
one, with the machine described. Let nothing else run meanwhile.
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
    """Run the rows asked for, one after the other."""
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
