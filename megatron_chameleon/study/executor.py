"""A job, and the executor that runs jobs in local processes.

A job whose output is complete is done and is never started, so the same command resumes after any
process of it was killed. This is the only rule for resuming.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

from megatron_chameleon.errors import STOPPED_STATUS

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that ask a process to save its state and stop.

Schedulers send SIGTERM, SIGUSR1 or SIGUSR2 before they end a job. A closed terminal sends SIGHUP.
"""
Handler = Callable[[int, FrameType | None], object]
State = Literal["waiting", "running", "done", "failed", "stopped"]
# Lines of the log of a failed job that are printed.
LOG_LINES = 3
PR_SET_PDEATHSIG = 1


def handle_stop_signals(handler: Handler) -> dict[signal.Signals, Any]:
    """Install ``handler``; return the previous handlers. SIGHUP stays ignored, as under nohup."""
    handled = [
        number
        for number in STOP_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    return {number: signal.signal(number, handler) for number in handled}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A piece of work with an output on disk, on which other jobs may depend.

    Attributes:
        name: unique name in the study.
        work: a command, or a picklable function for a process of
            :func:`~megatron_chameleon.study.workers.workers`. It gets what the process has
            prepared, and returns False after a stop.
        done: whether the output is complete. Called before the job starts and after it ends.
        after: names of the jobs that must be done before this one starts.
        log: file to which the command's output is appended; None for the terminal.
        seconds: estimate of the duration, relative to those of the other jobs.
        environment: environment variables of the command that differ from those of this process;
            None removes a variable.
        time_limit: how the command learns when to save and stop: a flag for the minutes left, such
            as --exit-duration-in-mins, or an environment variable for the Unix time. Any other
            command gets SIGTERM at that time.
    """

    name: str
    work: Sequence[str] | Callable[[Any], bool]
    done: Callable[[], bool]
    after: Sequence[str] = ()
    log: Path | None = None
    seconds: float = 1.0
    environment: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    time_limit: str | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """A change of a job's state: it has started or ended.

    Attributes:
        message: why the job failed.
        seconds: duration of a job that has ended.
        error: the exception of the job's function: UserError, or RuntimeError for a bug.
    """

    job: Job
    state: State
    message: str = ""
    seconds: float = 0.0
    error: Exception | None = None


class Process(Protocol):
    """A process that runs one job."""

    @property
    def waited_for(self) -> Sequence[Any]:
        """Objects for :func:`multiprocessing.connection.wait`; one is ready after the end."""

    def result(self) -> tuple[State, str | Exception] | None:
        """State of the job, and its error or error message; None while it runs."""

    def stop(self) -> None:
        """Let the job save its state and stop."""


class Executor:
    """Run jobs in local processes, several concurrently; a stopped job ends the session.

    A failed job only holds back the jobs that depend on it.

    Args:
        jobs: the jobs; of those that can start, the first one starts first.
        slots: maximum number of concurrent jobs.
        launch: starts a job, with the Unix time of the deadline.
        deadline: Unix time at which all jobs save their state and stop; None for no limit.

    Attributes:
        states: state of each job by name.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        slots: int,
        launch: Callable[[Job, float | None], Process] | None = None,
        deadline: float | None = None,
    ) -> None:
        self.jobs, self.slots, self.deadline = list(jobs), slots, deadline
        self.states: dict[str, State] = {
            job.name: "done" if job.done() else "waiting" for job in jobs
        }
        self.started: dict[str, float] = {}
        self._waiting = [job for job in jobs if self.states[job.name] == "waiting"]
        self._launch = launch or Command
        self._running: dict[str, tuple[Job, Process]] = {}
        self._is_stopping = False

    def count(self, state: State) -> int:
        """Number of jobs in a state."""
        return sum(each == state for each in self.states.values())

    @property
    def is_active(self) -> bool:
        """Whether a job runs or can start."""
        return bool(self._running) or self._next() is not None

    def stop(self) -> None:
        """Start no further jobs, and let the running jobs save their state and stop."""
        self._is_stopping = True
        for _, process in self._running.values():
            process.stop()

    def poll(self, seconds: float | None = None) -> list[Event]:
        """Start the jobs that can start, then wait until a job ends, or for ``seconds``."""
        events = self._start_jobs()
        if events or not self._running:
            return events
        left = None if self.deadline is None else max(0.0, self.deadline - time.time())
        timeouts = [each for each in (seconds, left) if each is not None]
        objects = [each for _, process in self._running.values() for each in process.waited_for]
        wait(objects, min(timeouts, default=None))
        if left == 0.0:
            self.deadline, self._is_stopping = None, True
            for job, process in self._running.values():
                if job.time_limit is None:
                    process.stop()
        for name, (job, process) in list(self._running.items()):
            result = process.result()
            if result is None:
                continue
            del self._running[name]
            state, problem = result
            if state == "done" and not job.done():
                state = "stopped"
            events.append(self._ended(job, state, problem))
        return events

    def _next(self) -> Job | None:
        """The first job that can start."""
        if self._is_stopping or len(self._running) >= self.slots:
            return None
        for job in self._waiting:
            if all(self.states[before] == "done" for before in job.after):
                return job
        return None

    def _start_jobs(self) -> list[Event]:
        events = list[Event]()
        while (job := self._next()) is not None:
            self._waiting.remove(job)
            self.started[job.name] = time.monotonic()
            if job.done():  # another job, or another command, has written the output meanwhile
                events.append(self._ended(job, "done", "already"))
            elif self.deadline is not None and time.time() >= self.deadline:
                events.append(self._ended(job, "stopped", ""))
            else:
                self.states[job.name] = "running"
                events.append(Event(job, "running"))
                try:
                    process = self._launch(job, self.deadline)
                except OSError as error:  # the program is missing, among others
                    events.append(self._ended(job, "failed", f"cannot start: {error}"))
                    continue
                self._running[job.name] = job, process
                if self._is_stopping:  # a signal arrived meanwhile
                    process.stop()
        return events

    def _ended(self, job: Job, state: State, problem: str | Exception) -> Event:
        self.states[job.name] = state
        self._is_stopping |= state == "stopped"
        seconds = time.monotonic() - self.started[job.name]
        error = problem if isinstance(problem, Exception) else None
        return Event(job, state, str(problem), seconds, error)


class Command:
    """A job's command in a process of its own, which is stopped if this process is killed."""

    def __init__(self, job: Job, deadline: float | None) -> None:
        assert not callable(job.work)
        words, environment = list(job.work), {**os.environ}
        changes = dict(job.environment)
        if deadline is not None and job.time_limit is not None:
            if job.time_limit.startswith("--"):
                words += [job.time_limit, f"{max(0.01, (deadline - time.time()) / 60):.2f}"]
            else:
                changes[job.time_limit] = f"{deadline:.0f}"
        for name, value in changes.items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        output = None
        if job.log is not None:
            job.log.parent.mkdir(parents=True, exist_ok=True)
            output = job.log.open("ab")
        self._is_stopping = False
        try:
            self._process = subprocess.Popen(
                words, env=environment, stdout=output, stderr=output, preexec_fn=_stop_with_parent
            )
        finally:
            if output is not None:
                output.close()
        self._descriptor = os.pidfd_open(self._process.pid)

    @property
    def waited_for(self) -> Sequence[Any]:
        """A descriptor that is ready when the process has ended."""
        return [self._descriptor]

    def result(self) -> tuple[State, str] | None:
        """State of the job, and the exit status if it failed; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        os.close(self._descriptor)
        if status == 0:
            return "done", ""
        if status == STOPPED_STATUS or self._is_stopping:
            return "stopped", ""
        return "failed", f"with status {status if status > 0 else 128 - status}"

    def stop(self) -> None:
        """Send SIGTERM."""
        self._is_stopping = True
        self._process.terminate()


_LIBC = ctypes.CDLL(None, use_errno=True)


def _stop_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when the executor ends, even by SIGKILL."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_jobs(jobs: Sequence[Job], slots: int, clock: Path, deadline: float | None = None) -> State:
    """Run commands; print their states, the time left, and the end of the log of failed jobs.

    Args:
        jobs: the jobs, whose work is a command.
        slots: maximum number of concurrent jobs.
        clock: file that holds the wall time of all sessions in whole seconds.
        deadline: Unix time at which all jobs save their state and stop; None for no limit.

    Returns:
        done if all jobs are done, otherwise failed if any job failed, otherwise stopped.

    Raises:
        KeyboardInterrupt: after a stop signal, once the running jobs have ended.
    """
    executor = Executor(jobs, slots, deadline=deadline)
    print(f"{executor.count('done')} of {len(jobs)} jobs are done; {slots} at a time", flush=True)
    before = read_clock(clock)
    start, is_interrupted = time.monotonic(), False
    actual = expected = 0.0

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if not is_interrupted:
            is_interrupted = True
            print("stopping; the same command resumes", file=sys.stderr, flush=True)
            executor.stop()

    handlers = handle_stop_signals(interrupt)
    try:
        while executor.is_active:
            for event in executor.poll():
                if event.state != "running":
                    write_clock(clock, before + int(time.monotonic() - start))
                if event.state == "done" and not event.message:
                    actual, expected = actual + event.seconds, expected + event.job.seconds
                line = _line(event)
                if event.state == "done" and not event.message:
                    left = time_left(executor, (actual + 1) / (expected + 1))
                    line += (
                        f" ({executor.count('done')} of {len(jobs)}); about {left / 60:.0f} minutes"
                        " left"
                    )
                print(line, flush=True, file=sys.stderr if event.state == "failed" else sys.stdout)
    except BaseException:
        executor.stop()
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if is_interrupted:
        raise KeyboardInterrupt
    if executor.count("done") == len(jobs):
        return "done"
    if not executor.count("failed"):
        return "stopped"
    print(
        f"{executor.count('failed')} jobs failed, and {executor.count('waiting')} depend on them; "
        "fix the errors above, then the same command resumes",
        file=sys.stderr,
        flush=True,
    )
    return "failed"


def read_clock(clock: Path) -> int:
    """Seconds of all sessions so far; 0 if there is no valid file."""
    try:
        return int(clock.read_text())
    except (OSError, ValueError):
        return 0


def write_clock(clock: Path, seconds: int) -> None:
    """Replace the file that :func:`read_clock` reads."""
    clock.parent.mkdir(parents=True, exist_ok=True)
    temporary = clock.with_name(f".{clock.name}.{os.getpid()}")
    temporary.write_text(f"{seconds}\n")
    os.replace(temporary, clock)


def time_left(executor: Executor, factor: float) -> float:
    """Estimate the seconds until all jobs are done.

    Args:
        executor: the executor.
        factor: actual duration of the jobs that are done, divided by their estimates.
    """
    left, now = 0.0, time.monotonic()
    for job in executor.jobs:
        state, seconds = executor.states[job.name], job.seconds * factor
        if state == "waiting":
            left += seconds
        elif state == "running":
            left += max(0.0, seconds - (now - executor.started[job.name]))
    return left / executor.slots


def _line(event: Event) -> str:
    name, log = event.job.name, event.job.log
    if event.state == "running":
        return f"\n== {name}" if log is None else f"started: {name} ({log})"
    if event.state == "stopped":
        return f"stopped: {name}; the same command resumes"
    if event.state == "done":
        return (
            f"already done: {name}"
            if event.message
            else (f"done: {name}, after {event.seconds:.0f} s")
        )
    line = f"failed: {name}, {event.message}"
    if log is None:
        return line
    # Progress bars separate their states by carriage returns.
    text = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([line, f"  end of {log}:", *(f"  {each}" for each in text)])
