"""The comparison of methods for one GPU, with targets, on the simulated device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import Mixture
from tests.simulated_cuda.conftest import Tools

# A dozen processes import torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).parents[2]
# The scripts' python: runs the commands of the package on the device.
PYTHON = f"""#!/usr/bin/env bash
if [ "$1 $2" = "-m megatron_chameleon" ]; then
  shift 2
  exec {sys.executable} -m tests.simulated_cuda.run_tool \
    {REPOSITORY}/megatron_chameleon/__main__.py "$@"
fi
exec {sys.executable} "$@"
"""


def test_small_models_are_compared_on_the_device(tools: Tools, tmp_path: Path) -> None:
    program = tmp_path / "bin/python"
    program.parent.mkdir()
    program.write_text(PYTHON)
    program.chmod(0o755)
    choices = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "TARGETS": "news",
        "SIZE": "gpu",
        "BASE": "nano",
        "PROXY_MODEL": "nano",
        "BASE_STEPS": "10",
        "PROXY_STEPS": "10",
        "METHODS": "uniform mixmin",
        "RUN": str(tmp_path / "run"),
        "CORPUS": str(tools.corpus),
        "TORCHDYNAMO_DISABLE": "1",
    }
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | choices
    small = ["--seq-length", "64", "--global-batch-size", "8", "--micro-batch-size", "8"]
    command = ["bash", str(REPOSITORY / "examples/compare_methods.sh"), "--", *small]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "run/targets/news"
    for name in choices["METHODS"].split():
        mixture = Mixture.load(folder / f"4-mixture/{name}.json")
        assert set(mixture.weights) == {"code", "poems"}
    log = (folder / "logs/uniform-seed1.log").read_text()
    assert "step 10/10" in log
    assert "x cpu" not in log
    assert "MixMin" in done.stdout
