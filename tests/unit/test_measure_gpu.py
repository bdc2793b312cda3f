"""make measure-gpu: steps are isolated, resumable, and their results are committed."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import psutil
import pytest

from benchmarks import process_tree
from benchmarks.gpu_tests import PARTS
from benchmarks.measure import measure_rows
from benchmarks.measure_gpu import ROOT, STEPS, Step, measure

WRITING = """
import json, pathlib, sys
folder = pathlib.Path("benchmarks/results")
folder.mkdir(parents=True, exist_ok=True)
(folder / f"{sys.argv[1]}.json").write_text(json.dumps({"rows": []}))
with open("calls", "a") as calls:
    calls.write(sys.argv[1] + "\\n")
"""
# Like torchrun with a rank that hangs in a collective: another session that ignores SIGTERM.
HANGING = """
import pathlib, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)"
child = subprocess.Popen([sys.executable, "-c", deaf + "; time.sleep(600)"],
                         start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
pathlib.Path("child").write_text(str(child.pid))
time.sleep(600)
"""
UNFINISHED = """
import pathlib, sys
rows = pathlib.Path(sys.argv[2])
rows.write_text(rows.read_text() + "row" if rows.exists() else "row")
sys.exit(0 if rows.read_text() == "rowrow" else 75)
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
    (tmp_path / "unfinished.py").write_text(WRITING + UNFINISHED)
    (tmp_path / "failing.py").write_text(WRITING + "\nsys.exit('no such device')\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "start")
    return tmp_path


def run(repository: Path, *steps: Step, retry=False, seconds=600.0) -> int:
    return measure(steps, repository, commit=True, retry=retry, seconds=seconds)


FIRST, LAST = (Step(name, ("writing.py", name), 60) for name in ("first", "last"))
FAILING = Step("failing", ("failing.py", "failing"), 60)
HANGING_STEP = Step("hanging", ("hanging.py",), 5)
UNFINISHED_STEP = Step("unfinished", ("unfinished.py", "rows", "{folder}/rows"), 60)


def calls(repository: Path) -> list[str]:
    return (repository / "calls").read_text().split()


def committed(repository: Path) -> list[str]:
    return git(repository, "ls-files", "benchmarks/results").split()


def test_failed_and_hanging_steps_do_not_stop_the_others(repository, capfd, monkeypatch):
    monkeypatch.setattr(process_tree, "SECONDS_TO_STOP", 1)
    (repository / "staged").touch()
    git(repository, "add", "staged")
    assert run(repository, FIRST, FAILING, HANGING_STEP, LAST) == 1
    assert committed(repository) == [f"benchmarks/results/{n}.json" for n in ("first", "last")]
    assert git(repository, "log", "--format=%s").count("benchmarks: ") == 2
    assert "A  staged" in git(repository, "status", "--porcelain")
    table = capfd.readouterr().out.splitlines()[-4:]
    assert [line.split()[1] for line in table] == ["ok", "failed", "timed", "ok"]
    assert "no such device" in table[1]
    child = int((repository / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_finished_steps_are_skipped_and_the_others_resumed(repository):
    assert run(repository, FIRST, FAILING) == 1
    assert run(repository, FIRST, FAILING, LAST) == 1
    assert calls(repository) == ["first", "failing", "last"]
    assert run(repository, FIRST, FAILING, LAST, retry=True) == 1
    assert calls(repository)[3:] == ["failing"]
    assert run(repository, UNFINISHED_STEP) == 75
    assert run(repository, UNFINISHED_STEP) == 0
    (repository / "writing.py").write_text(WRITING + "# changed\n")
    long = Step("long", ("writing.py", "long"), 500)
    assert run(repository, FIRST, long, seconds=100) == 75  # the time limit leaves it
    assert run(repository, long) == 0
    assert calls(repository)[-2:] == ["first", "long"]


def test_results_without_git_are_kept(repository, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(repository))
    assert [run(repository, step) for step in (FIRST, FIRST, LAST)] == [0, 0, 0]
    assert calls(repository) == ["first", "last"]
    assert "not committed" in capfd.readouterr().out


def test_rows_that_would_exceed_the_time_limit_are_deferred(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    saved: list[str] = []

    def row(what, seconds):
        clock[0] += seconds
        return {"what": what}

    def rows(seconds, finished):
        made = {w: lambda w=w, s=s: row(w, s) for w, s in {"a": 30, "b": 40, "c": 10}.items()}
        saved.clear()
        return measure_rows(made, lambda row: saved.append(row["what"]), seconds, finished)

    finished = tmp_path / "rows"
    for expected in (["a", "b"], ["c"], []):
        assert rows(100, finished) == (75 if "a" in expected else 0)
        assert saved == expected
    assert rows(200, None) == 0
    assert saved == ["a", "b", "c"]


def test_steps_fit_their_time_limits():
    assert sum(step.seconds for step in STEPS if step.gpus == 1) <= 45 * 60
    assert max(step.seconds for step in STEPS) <= 570
    for step in STEPS:
        assert (ROOT / step.arguments[0]).is_file()


def test_every_gpu_test_is_in_one_step():
    parts = sorted(name for part in PARTS.values() for name in part)
    found = []
    for path in (ROOT / "tests/gpu").glob("test_*.py"):
        names = [getattr(node, "name", "") for node in ast.parse(path.read_text()).body]
        tests = [f"{path.name}::{name}" for name in names if name.startswith("test_")]
        found += [path.name] if path.name in parts else tests
    assert sorted(found) == parts
    steps = {step.arguments[1] for step in STEPS if "gpu_tests" in step.arguments[0]}
    assert steps == {*PARTS, "several-gpus"}
