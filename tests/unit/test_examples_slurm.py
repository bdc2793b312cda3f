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
echo "${SRUN_CPUS_PER_TASK:-not told}" > "$SAID/cores.txt"
echo "$LASTS" > "$SAID/later"
exit "$STATUS"
""",
    "squeue": """
echo "$@" > "$SAID/squeue.txt"
echo "${SAYS:-$(date -d "@$ENDS" +%Y-%m-%dT%H:%M:%S)}"
""",
    "date": """
[ "$*" = +%s ] || exec /bin/date "$@"
echo $(($(/bin/date +%s) + $(cat "$SAID/later" 2> /dev/null || echo 0)))
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
    """``job(left, *arguments, **environment)``: the script as a job with ``left`` seconds to go.

    What it starts lasts LASTS seconds by the clock that the script sees.
    """
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run(left, *arguments, **environment):
        own = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SAID": str(tmp_path),
            "ENDS": str(round(time.time()) + left),
            "STATUS": "0",
            "LASTS": "0",
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


@pytest.mark.parametrize(("lasts", "status"), [(7000, 0), (6000, 0), (7000, 3), (6000, 3)])
def test_only_a_run_that_leaves_because_its_time_is_up_is_queued_again(
    job, tmp_path, lasts, status
):
    done = job(7200, LAUNCHER, LASTS=str(lasts), STATUS=str(status))
    assert done.returncode == status
    queued = tmp_path / "queue.txt"
    assert queued.exists() == (lasts > 7200 - 600 and status == 0)
    if queued.exists():
        assert queued.read_text() == "requeue 31234\n"


@pytest.mark.parametrize(("minutes", "again"), [("15", True), ("5", False)])
def test_the_time_to_save_can_be_chosen(job, tmp_path, minutes, again):
    assert job(7200, LAUNCHER, LASTS="6500", SAVE_MINUTES=minutes).returncode == 0
    assert (tmp_path / "queue.txt").exists() == again


def test_a_job_that_is_too_short_is_refused_and_not_queued_again(job, tmp_path):
    done = job(500, LAUNCHER)
    assert (done.returncode, (tmp_path / "srun.txt").exists()) == (2, False)
    assert not (tmp_path / "queue.txt").exists()
    assert "error: the job ends within SAVE_MINUTES=10; give it a longer --time" in done.stderr


@pytest.mark.parametrize(
    ("asked", "told"), [({"SLURM_CPUS_PER_TASK": "32"}, "32"), ({}, "not told")]
)
def test_steps_have_the_cores_that_the_job_asked_for(job, tmp_path, asked, told):
    assert job(7200, LAUNCHER, **asked).returncode == 0
    assert (tmp_path / "cores.txt").read_text() == f"{told}\n"


@pytest.mark.parametrize("end", ["N/A", " "])
def test_a_job_without_an_end_is_refused_in_a_line(job, tmp_path, end):
    done = job(7200, LAUNCHER, SAYS=end)
    assert (done.returncode, (tmp_path / "srun.txt").exists()) == (2, False)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: SLURM says that the job ends at '{end}', which is no time")


@pytest.mark.parametrize(("restarts", "kept"), [(None, True), ("0", True), ("1", False)])
def test_a_job_that_comes_back_overwrites_nothing(job, tmp_path, restarts, kept):
    count = {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    done = job(7200, LAUNCHER, "--", "--overwrite", "--seed", "3", **count)
    assert done.returncode == 0, done.stderr
    command = (tmp_path / "srun.txt").read_text().splitlines()
    assert ("--overwrite" in command) == kept
    assert command[command.index("--seed") + 1] == "3"


@pytest.mark.parametrize("arguments", [(), ("examples/nothing.sh",)])
def test_without_a_launcher_it_says_how_it_is_used(job, tmp_path, arguments):
    done = job(7200, *arguments)
    assert (done.returncode, (tmp_path / "srun.txt").exists()) == (2, False)
    assert done.stderr.startswith("usage: sbatch [options] ")
