"""Configure pytest for all tests: one thread per process, marks, groups and a time limit."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

# These variables are set before torch and numpy are imported. Workers and ranks share a few cores,
# and the tests of bit-identity need one thread per process for a fixed order of additions.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# If the user sets more threads, they must sleep while they wait: spinning threads on shared cores
# would slow the tests by minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest

# A shell starts background processes with SIGINT ignored, and their child processes inherit this.
# Some tests interrupt commands with SIGINT, so restore the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--start-until",
        type=float,
        metavar="EPOCH_SECONDS",
        help="skip tests that would start after this time; CI limits the slow tests this way",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--start-until")
    if limit is not None and time.time() > limit:
        pytest.skip("--start-until has passed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the mark ``gpu`` to every test in tests/gpu."""
    for item in items:
        if item.path.is_relative_to(TESTS / "gpu"):
            item.add_marker(pytest.mark.gpu)


def group_of(nodeid: str) -> str:
    """Return a test's group: its file's name in tests/unit, or else its folder's name."""
    path = nodeid.partition("::")[0]
    folder = path.split("/")[1]
    return path if folder == "unit" else folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each group on a single worker, which sets up fixtures and launches ranks only once.

    xdist 3.8 ignores ``--dist loadgroup`` under pytest 9.2, which has no ``Node._nodeid``. Groups
    start in the order of collection. The groups with many launches come first, so that all workers
    finish at about the same time.
    """
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


def pytest_collection_finish() -> None:
    """Exclude imported modules from the garbage collection at the end of each training run."""
    gc.freeze()
