"""make measure-gpu: steps are isolated and resumable."""

from __future__ import annotations

import ast
from pathlib import Path

import psutil
import pytest

from benchmarks import process_tree
from benchmarks.gpu_tests import PARTS
from benchmarks.measure import measure_rows
from benchmarks.measure_gpu import ROOT, STEPS, Step, measure

WRITING = """
import pathlib, sys
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "writing.py").write_text(WRITING)
    (tmp_path / "hanging.py").write_text(HANGING)
    (tmp_path / "unfinished.py").write_text(WRITING + UNFINISHED)
    (tmp_path / "failing.py").write_text(WRITING + "\nsys.exit('no such device')\n")
    return tmp_path


def run(checkout: Path, *steps: Step, retry=False, seconds=600.0) -> int:
    return measure(steps, checkout, retry=retry, seconds=seconds)


FIRST, LAST = (Step(name, ("writing.py", name), 60) for name in ("first", "last"))
FAILING = Step("failing", ("failing.py", "failing"), 60)
HANGING_STEP = Step("hanging", ("hanging.py",), 5)
UNFINISHED_STEP = Step("unfinished", ("unfinished.py", "rows", "{folder}/rows"), 60)


def calls(checkout: Path) -> list[str]:
    return (checkout / "calls").read_text().split()


def test_failed_and_hanging_steps_do_not_stop_the_others(checkout, capfd, monkeypatch):
    monkeypatch.setattr(process_tree, "SECONDS_TO_STOP", 1)
    assert run(checkout, FIRST, FAILING, HANGING_STEP, LAST) == 1
    assert calls(checkout) == ["first", "failing", "last"]
    table = capfd.readouterr().out.splitlines()[-4:]
    assert [line.split()[1] for line in table] == ["ok", "failed", "timed", "ok"]
    assert "no such device" in table[1]
    child = int((checkout / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_finished_steps_are_skipped_and_the_others_resumed(checkout):
    assert run(checkout, FIRST, FAILING) == 1
    assert run(checkout, FIRST, FAILING, LAST) == 1
    assert calls(checkout) == ["first", "failing", "last"]
    assert run(checkout, FIRST, FAILING, LAST, retry=True) == 1
    assert calls(checkout)[3:] == ["failing"]
    assert run(checkout, UNFINISHED_STEP) == 75
    assert run(checkout, UNFINISHED_STEP) == 0
    (checkout / "writing.py").write_text(WRITING + "# changed\n")
    long = Step("long", ("writing.py", "long"), 500)
    assert run(checkout, FIRST, long, seconds=100) == 75  # the time limit leaves it
    assert run(checkout, long) == 0
    assert calls(checkout)[-2:] == ["first", "long"]


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
