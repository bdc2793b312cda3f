"""Jobs run in the order of their dependencies, stop on request, and resume after any kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_chameleon.study.executor import Executor, Job, run_jobs

# A job that saves its state and exits when it is stopped.
STOPPABLE = "trap 'touch {0}.saved; exit 1' TERM; touch {0}.started; sleep 60 & wait"


def job(folder: Path, name: str, script: str = "", after: tuple[str, ...] = (), **fields) -> Job:
    """A job whose output is the file ``name``; by default, it appends a line to ``order``."""
    output = folder / name
    script = script or f"echo {name} >> {folder}/order; touch {output}"
    work = ("bash", "-c", script.format(output), "job")
    log = folder / f"{name}.log"
    return Job(name=name, work=work, done=output.exists, after=after, log=log, **fields)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_a_failed_job_holds_back_only_its_dependents(tmp_path, capsys):
    fails = "echo one; echo 'error: it is lost' >&2; exit 3"
    jobs = [
        job(tmp_path, "c", after=("b",)),
        job(tmp_path, "a"),
        job(tmp_path, "b", fails, after=("a",)),
        job(tmp_path, "d", after=("a",)),
    ]
    assert run_jobs(jobs, 1, tmp_path / "seconds") == "failed"
    printed = capsys.readouterr()
    assert "failed: b, with status 3" in printed.err
    assert "error: it is lost" in printed.err
    assert (tmp_path / "order").read_text().split() == ["a", "d"]
    jobs[2] = job(tmp_path, "b", after=("a",))
    assert run_jobs(jobs, 1, tmp_path / "seconds") == "done"
    assert "2 of 4 jobs are done" in capsys.readouterr().out
    assert (tmp_path / "order").read_text().split() == ["a", "d", "b", "c"]


def test_no_more_jobs_than_slots_run_at_once(tmp_path):
    count = (
        f"mkdir {tmp_path}/running.{{0}}; ls -d {tmp_path}/running.* | wc -l >> {tmp_path}/counts;"
        f"sleep 0.2; rmdir {tmp_path}/running.{{0}}; touch {tmp_path}/{{0}}"
    )
    jobs = [job(tmp_path, name, count.replace("{0}", name)) for name in "abcde"]
    assert run_jobs(jobs, 2, tmp_path / "seconds") == "done"
    assert max(int(line) for line in (tmp_path / "counts").read_text().split()) == 2


def test_jobs_save_and_stop_at_the_deadline(tmp_path, monkeypatch):
    sleeps = job(tmp_path, "sleeps", STOPPABLE)
    limited = 'printf "%s " "$@" "$UNTIL" "${{GONE-gone}}" > {0}'
    flag = job(tmp_path, "flag", limited, time_limit="--minutes")
    variable = job(tmp_path, "variable", limited, time_limit="UNTIL", environment={"GONE": None})
    later = job(tmp_path, "later", after=("sleeps",))
    monkeypatch.setenv("GONE", "here")
    deadline = time.time() + 4
    jobs = [sleeps, flag, variable, later]
    assert run_jobs(jobs, 3, tmp_path / "seconds", deadline) == "stopped"
    assert (tmp_path / "sleeps.saved").exists()
    words = (tmp_path / "flag").read_text().split()
    assert words[0] == "--minutes"
    assert 0.01 < float(words[1]) <= 0.07
    assert (tmp_path / "variable").read_text().split() == [f"{deadline:.0f}", "gone"]
    assert run_jobs([job(tmp_path, "late")], 1, tmp_path / "seconds", deadline) == "stopped"


def test_a_job_that_ends_without_its_output_is_stopped(tmp_path):
    jobs = [job(tmp_path, "a", "true"), job(tmp_path, "b")]
    assert run_jobs(jobs, 1, tmp_path / "seconds") == "stopped"
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_same_command_resumes_after_a_signal(tmp_path, number):
    script = f"""
from pathlib import Path
from megatron_chameleon.study.executor import run_jobs
from tests.unit.study.test_executor import STOPPABLE, job
folder = Path({str(tmp_path)!r})
run_jobs([job(folder, "a"), job(folder, "b", STOPPABLE)], 1, folder / "seconds")
"""
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        wait_for(tmp_path / "b.started")
        process.send_signal(number)  # schedulers, too, may signal only one process
    assert process.returncode == -(signal.SIGINT if number == signal.SIGTERM else number)
    wait_for(tmp_path / "b.saved")
    jobs = [job(tmp_path, "a"), job(tmp_path, "b")]
    assert Executor(jobs, 1).states == {"a": "done", "b": "waiting"}
    assert run_jobs(jobs, 1, tmp_path / "seconds") == "done"
    assert (tmp_path / "order").read_text().split() == ["a", "b"]
