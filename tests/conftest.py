"""Settings of all tests: single-threaded processes, marks and groups by folder, a time limit."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

# Set before torch and numpy are imported. Workers and ranks share a few cores, and the tests of
# bit-identity need one thread per process for a fixed order of additions.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With more threads, spinning on shared cores would take minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest

# Processes that a shell starts in the background ignore SIGINT. The commands that tests interrupt
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--start-until",
        type=float,
        metavar="EPOCH_SECONDS",
        help="skip tests that would start later; CI limits the slow tests to its time budget",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--start-until")
    if limit is not None and time.time() > limit:
        pytest.skip("--start-until has passed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in tests/gpu as ``gpu``, and group tests that share fixtures.

    With ``--dist loadgroup`` the tests of a group run on one worker, which sets up their fixtures
    once. A group is a file of tests/unit, or another folder, whose tests share launches of ranks.
    """
    for item in items:
        path = item.path.relative_to(TESTS)
        folder = path.parts[0]
        if folder == "gpu":
            item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.xdist_group(str(path) if folder == "unit" else folder))


def pytest_collection_finish() -> None:
    """Exclude imported modules from the garbage collection at the end of each training run."""
    gc.freeze()
