"""The CPU stand-in. tests/unit/training trains with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def test_the_stand_in_replaces_cuda_calls():
    command = [sys.executable, "-m", "tests.unit.parallel.cpu_checks"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"  # as in NVIDIA's containers
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
