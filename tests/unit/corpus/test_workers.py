from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_chameleon.corpus.workers import work_in_processes
from megatron_chameleon.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


@dataclasses.dataclass(frozen=True)
class Writing:
    """Writes a file for each number, with the process that did it."""

    folder: Path
    ends_at: int | None = None
    how: str = ""

    def __call__(self, on_bytes: Callable[[int], object]) -> Callable[[int], object]:
        def write(number: int) -> None:
            if number == self.ends_at:
                self._end()
            on_bytes(number)
            (self.folder / f"{number}").write_text(f"{os.getpid()}")

        return write

    def _end(self) -> None:
        if self.how == "mistake":
            raise UserError("a mistake of the user's")
        if self.how == "defect":
            raise KeyError("a defect")
        if self.how == "exit":
            os._exit(3)
        if self.how == "sleep":
            (self.folder / "asleep").touch()
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, self.how))


def done(folder):
    return {int(path.name) for path in folder.iterdir()}


def test_all_numbers_are_done_once_and_all_bytes_told(tmp_path):
    told: list[int] = []
    before = set(psutil.Process().children())
    work_in_processes(Writing(tmp_path), list(range(40)), 2, told.append)
    assert done(tmp_path) == set(range(40))
    workers = {int((tmp_path / f"{number}").read_text()) for number in range(40)}
    assert len(workers) <= 2  # one may do all before the other has started
    assert os.getpid() not in workers
    assert sum(told) == sum(range(40))
    left = set(psutil.Process().children()) - before
    assert not workers & {child.pid for child in left}
    assert len(left) <= 1  # multiprocessing's own helper may stay


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("mistake", UserError, r"^a mistake of the user's$"),
        (
            "defect",
            RuntimeError,
            r"worker process failed:(.|\n)*in _end(.|\n)*KeyError: 'a defect'",
        ),
        ("SIGKILL", UserError, r"^a worker process was killed by SIGKILL, .* use fewer --workers"),
        ("SIGSEGV", UserError, r"^a worker process was killed by SIGSEGV"),
        ("SIGTERM", KeyboardInterrupt, None),
        ("exit", RuntimeError, "exited with status 3"),
    ],
)
def test_the_end_of_a_worker_is_told_and_ends_the_others(tmp_path, how, kind, message):
    before = set(psutil.Process().children())
    with pytest.raises(kind, match=message):
        work_in_processes(Writing(tmp_path, 5, how), list(range(1000)), 2, lambda _: None)
    assert 5 not in done(tmp_path)
    assert len(done(tmp_path)) < 1000
    left = set(psutil.Process().children()) - before
    assert not [child for child in left if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("how", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, -2)])
def test_no_worker_outlives_the_process_that_started_it(tmp_path, how, status, early):
    code = (
        "import sys, pathlib\n"
        "from megatron_chameleon.corpus.workers import work_in_processes\n"
        "from tests.unit.corpus.test_workers import Writing\n"
        "if __name__ == '__main__':\n"
        "    work = Writing(pathlib.Path(sys.argv[2]), 0, 'sleep')\n"
        "    work_in_processes(work, [0, 1], 2, lambda _: None)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    folder = tmp_path / "done"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, script, "--", folder],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        if early:  # while they are still being started
            wait_until(lambda: len(psutil.Process(process.pid).children()) >= 3)
            time.sleep(0.15)
        else:
            wait_until(lambda: {path.name for path in folder.iterdir()} == {"asleep", "1"})
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        # As a terminal does: to all of them.
        os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
        _, told = process.communicate(timeout=60)
        assert process.returncode == status
        wait_until(lambda: not any(worker.is_running() for worker in workers))
        assert told.count(b"KeyboardInterrupt") == (1 if how == signal.SIGINT else 0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
