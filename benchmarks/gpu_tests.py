"""Run a part of tests/gpu and record the outcome of each test on this device.

    python benchmarks/gpu_tests.py kernels|losses|runs|methods|several-gpus

Outcomes are written to benchmarks/results/tests-DEVICE.json after each test; tools/doctor.py reads
them to list what has run on a real device. The exit status is pytest's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = {
    "kernels": (
        "test_cross_entropy_on_a_gpu.py",
        "test_pooling_on_a_gpu.py",
        "test_attention_on_a_gpu.py",
    ),
    "losses": ("test_training_on_gpus.py::test_losses_are_those_of_the_cpu",),
    "runs": (
        "test_training_on_gpus.py::test_a_run_is_resumed_on_either_device",
        "test_training_on_gpus.py::test_the_memory_estimate_is_near_the_allocators_peak",
        "test_training_on_gpus.py::test_a_step_waits_for_the_gradients_norm_alone",
        "test_deterministic_runs.py",
    ),
    "methods": ("test_methods_on_a_gpu.py",),
}
"""Parts of the tests for one GPU; each part takes less than 6 minutes."""
SEVERAL_GPUS = "several-gpus"


class Outcomes:
    """A pytest plugin that selects tests by the GPUs they need, and records each one's outcome.

    Args:
        several: select the tests whose parameter ``ranks`` is above 1, instead of all other tests.
        record: called after each test with all outcomes: ``passed``, ``failed``, ``skipped``.
    """

    def __init__(self, *, several: bool, record: Callable[[dict[str, str]], object]) -> None:
        self._several, self._record = several, record
        self._by_test: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Select tests."""
        items[:] = [item for item in items if (ranks_of(item) > 1) == self._several]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of the first phase that did not pass, or ``passed``.

        Print failures at once: a run that is cut short never prints pytest's summary.
        """
        if report.failed:
            print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)
        if self._by_test.get(report.nodeid, "passed") == "passed":
            self._by_test[report.nodeid] = report.outcome
        if report.when == "teardown":
            self._record(self._by_test)


def ranks_of(item: pytest.Item) -> int:
    """Return the number of ranks that a test needs; each rank needs a GPU."""
    case = getattr(item, "callspec", None)
    return 1 if case is None else int(case.params.get("ranks", 1))


def main() -> int:
    """Run one part and write its row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=(*PARTS, SEVERAL_GPUS))
    part = parser.parse_args().part
    import torch

    from benchmarks.measure import device_file, machine, put_row
    from megatron_chameleon.artifacts.provenance import git_commit
    from megatron_chameleon.parallel.layout import device_name

    device = device_name(torch.device("cuda"))
    file, on = device_file("tests", device), machine() | {"device": device}
    row = {"what": f"tests/gpu: {part}", "commit": git_commit()}
    outcomes = Outcomes(
        several=part == SEVERAL_GPUS,
        record=lambda by_test: put_row(file, on, row | {"tests": dict(sorted(by_test.items()))}),
    )
    tests = [str(ROOT / "tests/gpu" / name) for name in PARTS.get(part, ("",))]
    return int(pytest.main(["-m", "gpu", "-p", "no:cacheprovider", *tests], [outcomes]))


if __name__ == "__main__":
    sys.exit(main())
