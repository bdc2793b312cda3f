"""make measure-gpu: failing and hanging steps keep no other from running; results are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu_tests import PARTS
from benchmarks.measure_gpu import ROOT, STEPS, Step, measure

WRITING = """
import json, pathlib, sys
folder = pathlib.Path("benchmarks/results")
folder.mkdir(parents=True, exist_ok=True)
(folder / f"{sys.argv[1]}.json").write_text(json.dumps({"rows": []}))
with open("calls", "a") as calls:
    calls.write(sys.argv[1] + "\\n")
"""
HANGING = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("child").write_text(str(child.pid))
time.sleep(600)
"""


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "A Tester")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "tester@example.org")
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("/runs/\ncalls\nchild\n")
    (tmp_path / "writing.py").write_text(WRITING)
    (tmp_path / "hanging.py").write_text(HANGING)
    (tmp_path / "failing.py").write_text(WRITING + "\nsys.exit('no such device')\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "start")
    return tmp_path


def run(repository: Path, *steps: Step, commit=True, retry=False, seconds=600.0) -> int:
    return measure(steps, repository, commit=commit, retry=retry, seconds=seconds)


FIRST, LAST = (Step(name, ("writing.py", name), 60) for name in ("first", "last"))
FAILING = Step("failing", ("failing.py", "failing"), 60)
HANGING_STEP = Step("hanging", ("hanging.py",), 4)


def calls(repository: Path) -> list[str]:
    return (repository / "calls").read_text().split()


def committed(repository: Path) -> list[str]:
    return git(repository, "ls-files", "benchmarks/results").split()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_others_run_after_a_failure_and_results_are_committed(repository, capfd):
    (repository / "staged").touch()
    git(repository, "add", "staged")
    assert run(repository, FIRST, FAILING, HANGING_STEP, LAST) == 1
    assert committed(repository) == [f"benchmarks/results/{n}.json" for n in ("first", "last")]
    assert git(repository, "log", "--format=%s").count("benchmarks: ") == 2
    assert "A  staged" in git(repository, "status", "--porcelain")
    table = capfd.readouterr().out.splitlines()[-4:]
    assert [line.split()[1] for line in table] == ["ok", "failed", "timed", "ok"]
    assert "no such device" in table[1]
    assert not is_running(int((repository / "child").read_text()))


def test_finished_steps_are_skipped_until_the_code_changes(repository):
    assert run(repository, FIRST, FAILING) == 1
    assert run(repository, FIRST, FAILING, LAST) == 1
    assert calls(repository) == ["first", "failing", "last"]
    assert run(repository, FIRST, FAILING, LAST, retry=True) == 1
    assert calls(repository)[3:] == ["failing"]
    (repository / "writing.py").write_text(WRITING + "# changed\n")
    assert run(repository, FIRST) == 0
    assert calls(repository)[4:] == ["first"]


def test_a_call_of_limited_time_leaves_the_rest_for_the_next(repository):
    long = Step("long", ("writing.py", "long"), 500)
    assert run(repository, FIRST, long, commit=False, seconds=100) == 75
    assert calls(repository) == ["first"]
    assert run(repository, FIRST, long, commit=False) == 0
    assert calls(repository) == ["first", "long"]
    assert committed(repository) == []


def test_a_commit_that_git_refuses_is_a_failure(repository):
    hook = repository / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho no >&2; exit 1\n")
    hook.chmod(0o755)
    assert run(repository, FIRST) == 1


def test_all_steps_take_45_minutes_at_most_and_each_fits_in_a_call():
    assert sum(step.seconds for step in STEPS) <= 45 * 60
    assert max(step.seconds for step in STEPS) < 600
    for step in STEPS:
        assert (ROOT / step.arguments[0]).is_file()


def test_every_gpu_test_is_in_one_part():
    files = sorted(name for part in PARTS.values() for name in part)
    assert files == sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py"))


def test_without_a_cuda_device_nothing_is_run():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/measure_gpu.py")], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "CUDA" in done.stderr
    assert done.stdout == ""
