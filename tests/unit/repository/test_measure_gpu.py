"""Test that the steps of make measure-gpu are isolated and resumable."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from benchmarks import process_tree
from benchmarks.measure_gpu import Step, measure

WRITING = """
import pathlib, sys
with open("calls", "a") as calls:
    calls.write(sys.argv[1] + "\\n")
"""
# Imitate torchrun with a rank that hangs in a collective: its child process runs in another session
# and ignores SIGTERM.
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
    assert run(checkout, FIRST, long, seconds=100) == 75  # too little time is left for the step
    assert run(checkout, long) == 0
    assert calls(checkout)[-2:] == ["first", "long"]
