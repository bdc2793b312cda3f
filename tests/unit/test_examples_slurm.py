"""What examples/slurm/pretrain.sbatch asks of SLURM. tests/launchers trains through it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = {
    "srun": """
printf '%s\\n' "$@" "$NNODES" "$MASTER_ADDR" "$MASTER_PORT" "$STOP_AT" > "$SAID/srun.txt"
exit "$STATUS"
""",
    "squeue": """
echo "$@" > "$SAID/squeue.txt"
date -d "@$ENDS" +%Y-%m-%dT%H:%M:%S
""",
    "scontrol": """
case $1 in
  show) printf 'n5\\nn6\\nn7\\n' ;;
  *) echo "$@" > "$SAID/queue.txt" ;;
esac
""",
}


@pytest.fixture
def job(tmp_path):
    """``job(left, *arguments, **environment)``: the script as a job with ``left`` seconds to go."""
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run(left, *arguments, **environment):
        own = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SAID": str(tmp_path),
            "ENDS": str(round(time.time()) + left),
            "STATUS": "0",
            "SLURM_JOB_ID": "31234",
            "SLURM_JOB_NODELIST": "n[5-7]",
            "SLURM_JOB_NUM_NODES": "3",
        }
        return subprocess.run(
            ["bash", str(EXAMPLES / "slurm" / "pretrain.sbatch"), *arguments],
            env={**os.environ, **own, **environment},
            capture_output=True,
            text=True,
        )

    return run


LAUNCHER = str(EXAMPLES / "pretrain_684m.sh")


def test_a_launcher_is_started_on_every_node_with_one_rendezvous(job, tmp_path):
    before = round(time.time())
    done = job(7200, LAUNCHER, "--", "--train-iters", "7")
    assert done.returncode == 0, done.stderr
    *command, nodes, address, port, stop = (tmp_path / "srun.txt").read_text().splitlines()
    assert command[-5:] == ["bash", LAUNCHER, "--", "--train-iters", "7"]
    assert (nodes, address, port) == ("3", "n5", "21234")
    assert 0 <= int(stop) - (before + 7200 - 600) <= 5
    assert "--jobs 31234" in (tmp_path / "squeue.txt").read_text()
    assert not (tmp_path / "queue.txt").exists()


@pytest.mark.parametrize(("left", "again"), [(500, True), (700, False)])
@pytest.mark.parametrize("status", [0, 3])
def test_only_a_job_whose_time_is_up_goes_back_into_the_queue(job, tmp_path, left, again, status):
    done = job(left, LAUNCHER, STATUS=str(status))
    assert done.returncode == status
    assert (tmp_path / "queue.txt").exists() == again
    if again:
        assert (tmp_path / "queue.txt").read_text() == "requeue 31234\n"


def test_the_time_to_save_can_be_chosen(job, tmp_path):
    assert job(700, LAUNCHER, SAVE_MINUTES="15").returncode == 0
    assert (tmp_path / "queue.txt").exists()


@pytest.mark.parametrize("arguments", [(), ("examples/nothing.sh",)])
def test_without_a_launcher_it_says_how_it_is_used(job, tmp_path, arguments):
    done = job(7200, *arguments)
    assert (done.returncode, (tmp_path / "srun.txt").exists()) == (2, False)
    assert done.stderr.startswith("usage: sbatch [options] ")
