"""Worker processes that run one function after another, for jobs that start in no time.

A worker keeps its imports, and on a GPU its CUDA context, from one job to the next.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from megatron_chameleon.errors import UserError, first_line, system_error_message
from megatron_chameleon.study.executor import STOP_SIGNALS, Job, Process, State

# Exit codes of a worker that a stop signal ended; 0 is that of SIGINT.
STOPPED = (0, *(-number for number in STOP_SIGNALS))


@contextlib.contextmanager
def workers(
    count: int, prepare: Callable[[], Any], fewer: str, preload: str | None = None
) -> Iterator[Callable[[Job, float | None], Process]]:
    """Provide the ``launch`` of an executor with ``count`` slots; kill its workers on an error.

    All workers are started with stop signals blocked. A scheduler sends its stop signal to all
    processes of a job. If the signal ended the process that forks workers, they would count as dead
    before they have saved their state.

    Args:
        count: number of worker processes.
        prepare: picklable function that each worker calls once, before its first job; its result
            is passed to the work of each job.
        fewer: for messages, how the user runs fewer jobs concurrently.
        preload: fork the workers from a process that has imported this module, since the imports
            take several seconds. None to spawn them, because forked processes cannot use CUDA.
    """
    pool = list[_Worker]()
    context = multiprocessing.get_context("forkserver" if preload else "spawn")
    multiprocessing.set_forkserver_preload([preload] if preload else [])
    resource_tracker.ensure_running()  # started first, since starting it unblocks the signals

    def launch(job: Job, deadline: float | None) -> Process:
        assert deadline is None, "workers get stop signals only"
        worker = next(worker for worker in pool if not worker.is_busy)
        worker.start(job)
        return worker

    try:
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            for _ in range(count):
                pool.append(_Worker(context, prepare, fewer))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
        yield launch
    except BaseException:
        for worker in pool:
            worker.kill()
        raise
    finally:
        for worker in pool:
            worker.close()


class _Worker:
    """A process that runs one job at a time.

    Workers share nothing. In a pool of :mod:`concurrent.futures`, they share a queue: a signal that
    ended a worker while it held the queue's lock would leave the others waiting for the lock.

    Attributes:
        is_busy: whether a job is running.
    """

    def __init__(self, context: Any, prepare: Callable[[], Any], fewer: str) -> None:
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=_work, args=(prepare, other_end))
        self._process.start()
        other_end.close()
        self._fewer, self.is_busy = fewer, False

    def start(self, job: Job) -> None:
        """Run the function of ``job``."""
        self.is_busy = True
        with contextlib.suppress(OSError):  # the process has ended; result() reports it
            self._connection.send(job.work)

    @property
    def waited_for(self) -> Sequence[Any]:
        """Objects that become ready when :meth:`result` can be called."""
        return [self._connection, self._process.sentinel]

    def result(self) -> tuple[State, str | Exception] | None:
        """State of the job, and its error; None while it runs."""
        if not (self._connection.poll() or not self._process.is_alive()):
            return None
        self.is_busy = False
        with contextlib.suppress(EOFError, OSError):  # the process has ended
            if self._connection.poll():
                result: tuple[State, str | Exception] = self._connection.recv()
                return result
        self._process.join()
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return "failed", UserError(
                "a worker process was killed, probably for lack of memory; run the same command "
                f"again with {self._fewer}"
            )
        if code in STOPPED:  # a stop signal ends a process that is not yet running the job
            return "stopped", ""
        return "failed", RuntimeError(f"a worker process ended with exit code {code}")

    def stop(self) -> None:
        """Send SIGTERM to let the job save its state and stop."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def close(self) -> None:
        """End the process, which must be idle or killed."""
        self._connection.close()
        self._process.join()


def _work(prepare: Callable[[], Any], connection: Connection) -> None:
    """Call the functions that ``connection`` sends, until it is closed; send results back.

    The process ends when its parent ends, even if SIGKILL ends the parent.
    """

    def exit_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)  # may interrupt the job; what it has saved stays valid

    prepare_once = functools.cache(prepare)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        threading.Thread(target=exit_with_parent, daemon=True).start()
        while True:
            function = connection.recv()
            result: tuple[State, str | Exception]
            try:
                result = ("done" if function(prepare_once()) else "stopped"), ""
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of a library in Rust is no Exception
                result = "failed", portable(error)
            connection.send(result)


def portable(error: BaseException) -> UserError | RuntimeError:
    """Return an error in a form that survives pickling, which drops causes and tracebacks.

    Returns:
        UserError for a UserError or a system error; otherwise RuntimeError, with the traceback as a
        note, since the message may be searched for the text of system errors.
    """
    if isinstance(error, UserError):
        return UserError(str(error))
    if message := system_error_message(error):
        return UserError(f"{message}; fix it and run the same command again")
    failed = RuntimeError(f"{type(error).__name__} in a worker process: {first_line(error)}")
    failed.add_note("".join(traceback.format_exception(error)))
    return failed
