"""The CPU stand-in; all of its checks run in one separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.parallel.cpu_checks import all_checks

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("stand-in") / "results.json"
    command = [sys.executable, "-m", "tests.unit.parallel.cpu_checks", str(path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", list(all_checks()))
def test_the_stand_in(results, name):
    assert not results[name], results[name]
