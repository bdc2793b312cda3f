"""Run numbered tasks in worker processes that never outlive the process that started them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for_futures
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from typing import NoReturn, Protocol

from megatron_chameleon.errors import UserError, refusal_of_system

_SECONDS_BETWEEN_REPORTS = 0.2
# Set once in each worker process, by _start.
_get_task: Callable[[], Callable[[int], object]]


class Work(Protocol):
    """The task of a worker process, pickled."""

    def __call__(self, on_bytes: Callable[[int], object]) -> Callable[[int], object]:
        """Set up, once per process; return the function to call with each number.

        ``on_bytes`` is to be called with the number of bytes just read.
        """
        ...


def work_in_processes(
    work: Work, numbers: Sequence[int], num_workers: int, on_bytes: Callable[[int], object]
) -> None:
    """Call ``work`` with all ``numbers``, in their order, in ``num_workers`` new processes.

    Args:
        work: the task.
        numbers: its arguments.
        num_workers: number of processes, at most one per number.
        on_bytes: called with the number of bytes that workers have read.

    Raises:
        UserError: raised by a worker, or because a worker was killed.
        RuntimeError: with the traceback of a worker that failed for another reason.
        KeyboardInterrupt: if a worker was asked to end by SIGTERM.
    """
    # A new interpreter each: a forked copy could inherit locks that our threads hold.
    context = multiprocessing.get_context("spawn")
    num_workers = min(num_workers, len(numbers))
    num_bytes = context.Value("q")
    others = set(multiprocessing.active_children())
    workers: set[BaseProcess] = set()
    remaining, waiting = iter(numbers), set[Future[None]]()
    reported = 0
    setup = (work, num_bytes, num_workers)
    try:
        with ProcessPoolExecutor(num_workers, context, _start, setup) as pool:
            try:
                while True:
                    for number in itertools.islice(remaining, 2 * num_workers - len(waiting)):
                        with _interrupts_blocked():  # this may start a process
                            waiting.add(pool.submit(_run, number))
                            # At once: the list leaves out processes that have ended.
                            workers |= set(multiprocessing.active_children()) - others
                    if not waiting:
                        return
                    done, waiting = wait_for_futures(
                        waiting, _SECONDS_BETWEEN_REPORTS, return_when=FIRST_COMPLETED
                    )
                    total = num_bytes.get_obj().value  # a killed worker may hold the lock
                    on_bytes(total - reported)
                    reported = total
                    for future in done:
                        future.result()
            except BrokenProcessPool:
                raise
            except BaseException:
                for worker in workers:
                    worker.terminate()
                raise
    except BrokenProcessPool:
        # Only now: the pool's thread has collected all exit statuses, for which it races with us.
        _raise_reason(workers)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C; processes that are started here never receive it: their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raise_reason(workers: set[BaseProcess]) -> NoReturn:
    # The pool itself ends by SIGTERM those that are left when one was lost.
    statuses = {worker.exitcode or 0 for worker in workers} - {0, -signal.SIGTERM}
    if not statuses:
        raise KeyboardInterrupt
    status = min(statuses)
    if status < 0:
        raise UserError(
            f"a worker process was killed by {signal.Signals(-status).name}, as happens when "
            "memory runs out: use fewer --workers, or run the same command again"
        ) from None
    raise RuntimeError(f"a worker process exited with status {status}")


def _start(work: Work, num_bytes: Synchronized[int], num_workers: int) -> None:
    """Set up a worker process."""
    global _get_task
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # For libraries that would use all cores.
    threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    warnings.simplefilter("ignore")  # the parent process has warned

    def on_bytes(count: int) -> None:
        with num_bytes.get_lock():
            num_bytes.value += count

    _get_task = functools.cache(lambda: work(on_bytes))


def _run(number: int) -> None:
    try:
        _get_task()(number)
    except UserError:
        raise
    except BaseException as error:
        refusal = refusal_of_system(error)
        if refusal:
            raise UserError(f"{refusal}; fix that and run the same command again") from None
        raise RuntimeError(f"a worker process failed:\n{traceback.format_exc()}") from None


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
