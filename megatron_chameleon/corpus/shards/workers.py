"""Processes that do numbered work side by side, and never outlive the one that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from typing import NamedTuple, NoReturn, Protocol

from megatron_chameleon.errors import UserError

_SECONDS_BETWEEN_REPORTS = 0.2
_SECONDS_TO_END = 5.0


class Work(Protocol):
    """What a worker does. It is pickled."""

    def __call__(self, on_bytes: Callable[[int], object]) -> Callable[[int], object]:
        """Get ready, once in each process; return what is called with each number.

        ``on_bytes`` is to be told how many bytes were just read.
        """
        ...


class _Report(NamedTuple):
    """What a worker says: bytes it has read, the number it has done, or why it stops."""

    num_bytes: int = 0
    done: int | None = None
    problem: str | None = None
    defect: str | None = None


def work_in_processes(
    work: Work,
    numbers: Sequence[int],
    num_workers: int,
    on_bytes: Callable[[int], object],
) -> None:
    """Have ``num_workers`` new processes do all ``numbers``, each the next one when it is free.

    Args:
        work: what they do.
        numbers: what to call it with, in this order.
        num_workers: processes, at most one for each number.
        on_bytes: is told how many bytes some worker has read.

    Raises:
        UserError: what a worker raised, or that one was killed.
        RuntimeError: with the traceback of a worker that failed by a defect.
        KeyboardInterrupt: if somebody else told a worker to end.
    """
    waiting = list(reversed(numbers))
    with _started(work, min(num_workers, len(numbers))) as workers:
        at_work = dict(workers)
        for connection in workers:
            _send(connection, waiting.pop())
        while at_work:
            for ready in wait(list(at_work)):
                assert isinstance(ready, Connection)
                report = _received(ready, at_work[ready])
                on_bytes(report.num_bytes)
                if report.done is None:
                    continue
                if waiting:
                    _send(ready, waiting.pop())
                else:
                    del at_work[ready]
        for connection in workers:
            _send(connection, None)


@contextlib.contextmanager
def _started(work: Work, count: int) -> Iterator[dict[Connection, SpawnProcess]]:
    """Start the processes; on leaving, end those that are still there."""
    # A new interpreter each: a copy of this one could inherit locks that its threads hold.
    context = multiprocessing.get_context("spawn")
    # Now, since starting it lets interrupts through again.
    resource_tracker.ensure_running()
    workers: dict[Connection, SpawnProcess] = {}
    try:
        with _interrupts_held_back():  # from the new processes for good: this one ends them
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(work, theirs, count), daemon=True)
                process.start()
                workers[ours] = process
                theirs.close()  # so that the end of the process is the end of the pipe
        yield workers
    except BaseException:
        for process in workers.values():
            process.terminate()
        raise
    finally:
        _end(list(workers.values()))


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C comes after the block; processes that are started in it never see it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(processes: Sequence[BaseProcess]) -> None:
    end = time.monotonic() + _SECONDS_TO_END
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _send(connection: Connection, number: int | None) -> None:
    # A worker that is gone is told of where its end of the pipe is read.
    with contextlib.suppress(BrokenPipeError):
        connection.send(number)


def _received(connection: Connection, process: BaseProcess) -> _Report:
    try:
        report = connection.recv()
    except (EOFError, ConnectionResetError):
        _tell_end(process)
    assert isinstance(report, _Report)
    if report.problem is not None:
        raise UserError(report.problem)
    if report.defect is not None:
        raise RuntimeError(f"a worker process failed:\n{report.defect}")
    return report


def _tell_end(process: BaseProcess) -> NoReturn:
    process.join()
    status = process.exitcode or 0
    if status == -signal.SIGTERM:
        raise KeyboardInterrupt
    if status < 0:
        raise UserError(
            f"a worker process was killed by {signal.Signals(-status).name}, as happens where "
            "memory runs out: give fewer --workers, or run the same command again"
        )
    raise RuntimeError(f"a worker process left with status {status} and said nothing")


def _work(work: Work, connection: Connection, num_workers: int) -> None:
    """The life of a worker process."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    # Libraries that would use all cores for themselves.
    threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    warnings.simplefilter("ignore")  # the process that started this one has warned
    reports = _Reports(connection)
    try:
        do = work(reports.add_bytes)
        while (number := connection.recv()) is not None:
            do(number)
            reports.send(done=number)
    except EOFError:
        return  # nobody is there to work for
    except UserError as error:
        reports.send(problem=str(error))
    except BaseException:
        reports.send(defect=traceback.format_exc())


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


class _Reports:
    """A worker's end of the pipe, for all of its threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._bytes = 0
        self._sent = 0.0

    def add_bytes(self, num_bytes: int) -> None:
        """Count bytes, and tell of them now and then."""
        with self._lock:
            self._bytes += num_bytes
            late = time.monotonic() - self._sent > _SECONDS_BETWEEN_REPORTS
        if late:
            self.send()

    def send(
        self, done: int | None = None, problem: str | None = None, defect: str | None = None
    ) -> None:
        """Tell of the bytes counted so far, and of what else there is."""
        with self._lock:
            try:
                self._connection.send(_Report(self._bytes, done, problem, defect))
            except (BrokenPipeError, ConnectionResetError):
                os._exit(1)  # whoever started this process is gone, and was noticed here first
            self._bytes = 0
            self._sent = time.monotonic()
