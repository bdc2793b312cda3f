"""All rows of the data layer, against megatron.core's own code and Megatron-LM's algorithm.

    python benchmarks/data.py [--only index batches build preprocess]

Prints a line for each row. Where all were run it writes them, with the machine described, to
benchmarks/results/data.json. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROWS = ("index", "batches", "build", "preprocess")


def main() -> None:
    """Run the rows asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, help="rows to run")
    only = parser.parse_args().only
    warnings.filterwarnings("ignore", message=".*not installed.*")
    from benchmarks.measure import machine, write_results

    on = machine()
    print(", ".join(f"{name} {value}" for name, value in on.items() if name != "packages"))
    rows: list[dict[str, Any]] = []
    for name in ROWS:
        if name in only:
            rows += importlib.import_module(f"benchmarks.data_{name}").measure()
    if set(only) == set(ROWS):
        print(f"written to {write_results('data', rows, on)}")


if __name__ == "__main__":
    main()
