"""Where each CUDA feature has run: on a real device, on the tests' pretended one, or never."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Literal

Place = Literal["real device", "pretended device", "never"]

TABLE = Path("tests/cuda_coverage.toml")
GPU_TESTS, RESULTS = "tests/gpu", "benchmarks/results"


@dataclasses.dataclass(frozen=True)
class Coverage:
    """A CUDA feature, where it has run, and the names of the devices if they were real."""

    feature: str
    place: Place
    device: str = ""


def cuda_coverage(root: Path) -> tuple[Coverage, ...]:
    """Read the table of features and tests, and the outcomes of GPU tests.

    A feature has run on a real device if all of its GPU tests passed on one.

    Args:
        root: a checkout of the repository; in any other folder nothing is known.
    """
    if not (root / TABLE).is_file():
        return ()
    table = tomllib.loads((root / TABLE).read_text(encoding="utf-8"))
    outcomes = _outcomes(root / RESULTS)
    found = []
    for row in table["feature"]:
        tests = [f"{GPU_TESTS}/{name}" for name in row["gpu"]]
        devices = [
            device for device, by_test in outcomes.items() if tests and _passed(tests, by_test)
        ]
        if devices:
            found.append(Coverage(row["name"], "real device", f"({', '.join(devices)})"))
        else:
            found.append(Coverage(row["name"], "pretended device" if row["pretended"] else "never"))
    return tuple(found)


def _outcomes(folder: Path) -> dict[str, dict[str, str]]:
    """Device -> outcome by test, as benchmarks/gpu_tests.py wrote them."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("tests-*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            found.setdefault(row["machine"]["device"], {}).update(row["tests"])
    return found


def _passed(tests: list[str], outcomes: dict[str, str]) -> bool:
    for test in tests:
        cases = [o for name, o in outcomes.items() if name == test or name.startswith(f"{test}[")]
        if not cases or set(cases) != {"passed"}:
            return False
    return True
