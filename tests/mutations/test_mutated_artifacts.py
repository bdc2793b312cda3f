"""Run the real tools on mutated artifacts; tests/mutations/attack.py can run thousands of cases."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.distributed.launch import REPOSITORY
from tests.mutations.attack import KINDS

CASES_PER_KIND = 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mutated_artifacts_are_rejected_or_change_nothing():
    """The cases fork their process, so a new one runs them: pytest's may have threads."""
    cases = CASES_PER_KIND * len(KINDS)
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutations.attack", "--cases", str(cases), "--seed", "1"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    kinds, *_, total = (line.split() for line in done.stdout.splitlines())
    assert {"rejected", "unchanged"} <= {*kinds}
    assert total[-1] == str(cases)
