"""Swarm members train in worker processes of one device, with and without Ray."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import Cost
from megatron_chameleon.artifacts.swarm import MemberRecord, SwarmRecord, member_path
from megatron_chameleon.methods.swarm.train import LOG_NAME
from tests.distributed.launch import REPOSITORY, environment
from tests.simulated_cuda.cases import FP32_TOLERANCE, TRAINING_FLAGS
from tests.simulated_cuda.conftest import HERE, Tools

pytestmark = pytest.mark.slow

MEMBERS = 2

# Ray starts on this machine with a GPU that exists only in its schedule.
ONE_GPU = {
    "CUDA_VISIBLE_DEVICES": "0",
    "RAY_ADDRESS": "local",
    "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 4, "GPU": 1}),
}
SIMULATED = {"PYTHONPATH": f"{HERE / 'startup'}{os.pathsep}{REPOSITORY}"}


def swarm(command: str, folder: Path, *flags: str, **variables: str) -> str:
    words = ["swarm", command, "--swarm-dir", str(folder), *flags]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_chameleon", *words],
        cwd=REPOSITORY,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def members(folder: Path) -> list[MemberRecord]:
    """The members' results without their costs, which depend on the machine's load."""
    found = SwarmRecord.load(folder).finished.values()
    return [dataclasses.replace(record, cost=Cost()) for record in found]


def test_members_on_ray_are_those_of_workers_and_near_the_cpu(tools: Tools, tmp_path: Path) -> None:
    corpus = ("--corpus", str(tools.corpus))
    folders = [tmp_path / name for name in ("ray", "workers", "cpu")]
    more = ("--num-proxies", str(MEMBERS), "--eval-tokens", "576", "--log-interval", "1")
    swarm("generate", folders[0], *corpus, *TRAINING_FLAGS, *more)
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder)
    two = ("--members-at-once", "2")
    swarm("run", folders[0], *corpus, *two, "--ray", **SIMULATED, **ONE_GPU)
    printed = swarm("run", folders[1], *corpus, *two, **SIMULATED)
    assert "2 concurrently on each of 1 device(s)" in printed
    swarm("run", folders[2], *corpus, "--members", "0")
    on_ray, in_workers, on_cpu = map(members, folders)
    assert len(on_ray) == MEMBERS
    assert on_ray == in_workers
    (found,), (expected,) = on_ray[0].losses, on_cpu[0].losses  # after the last step
    assert found == pytest.approx(expected, rel=0, abs=FP32_TOLERANCE)
    for folder in folders[:2]:
        log = member_path(folder, 0).with_suffix("") / LOG_NAME
        assert "H100" in log.read_text()
