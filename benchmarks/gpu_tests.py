"""Run a part of tests/gpu, and record each test's outcome on this device.

    python benchmarks/gpu_tests.py kernels|runs|methods

Outcomes are written to benchmarks/results/tests-DEVICE.json, from which tools/doctor.py tells what
has run on a real device. The exit status is pytest's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = {
    "kernels": (
        "test_cross_entropy_on_a_gpu.py",
        "test_pooling_on_a_gpu.py",
        "test_swarm_on_a_gpu.py",
        "test_attention_on_a_gpu.py",
    ),
    "runs": ("test_training_on_gpus.py", "test_deterministic_runs.py"),
    "methods": ("test_methods_on_a_gpu.py",),
}


class Outcomes:
    """A pytest plugin that keeps the outcome of each test: ``passed``, ``failed``, ``skipped``."""

    def __init__(self) -> None:
        self.by_test: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the first phase that did not pass, or the call's."""
        if self.by_test.get(report.nodeid, "passed") == "passed":
            self.by_test[report.nodeid] = report.outcome


def main() -> int:
    """Run one part and write its row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    part = parser.parse_args().part
    import torch

    from benchmarks.measure import device_file, machine, put_row
    from megatron_chameleon.parallel.layout import device_name

    outcomes = Outcomes()
    files = [str(ROOT / "tests/gpu" / name) for name in PARTS[part]]
    status = int(pytest.main(["-m", "gpu", "-p", "no:cacheprovider", *files], [outcomes]))
    device = device_name(torch.device("cuda"))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    row = {
        "what": f"tests/gpu: {part}",
        "commit": commit.stdout.strip(),
        "tests": dict(sorted(outcomes.by_test.items())),
    }
    put_row(device_file("tests", device), machine() | {"device": device}, row)
    return status


if __name__ == "__main__":
    sys.exit(main())
