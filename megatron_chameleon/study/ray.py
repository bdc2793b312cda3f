"""Run a function on many items as tasks of a Ray cluster."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from megatron_chameleon.errors import UserError, first_line

Item = TypeVar("Item")
Result = TypeVar("Result")
# Times that a task is started again after its worker or machine died.
MAX_RETRIES = 3
_CONNECT_SECONDS = 20.0


def map_on_ray(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    num_cpus: float = 1.0,
    tasks_per_gpu: int = 0,
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` of each item, in the order in which the tasks finish.

    The tasks run on the cluster at ``$RAY_ADDRESS``, or on the one that ``ray start`` has started
    on this machine; otherwise, Ray is started on this machine until the last task has finished. A
    task whose worker or machine dies is started again up to ``MAX_RETRIES`` times; no other task is
    affected. Unfinished tasks are killed when the iterator is closed or raises, and when this
    process ends. The tasks' standard output goes to Ray's logs. Relative paths are those of this
    process: a task runs in its working folder, which must exist on every machine.

    Args:
        function: a module-level function, or a ``functools.partial`` of one; the workers import
            its module and get one copy of its arguments per machine.
        items: arguments of the tasks.
        num_cpus: CPU cores that Ray reserves for each task.
        tasks_per_gpu: number of tasks that share a GPU; 0, or a cluster without GPUs, gives the
            tasks no GPU.

    Raises:
        UserError: if Ray is not installed or unreachable, if a machine lacks the working folder,
            if ``function`` raises a UserError, or if a task's worker died ``MAX_RETRIES + 1``
            times. The task's other exceptions are raised unchanged.
    """
    if not items:
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports usage to its makers
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"Ray cannot be imported ({error}): pip install 'megatron-chameleon[ray]'"
        ) from error
    _require_reachable(os.environ.get("RAY_ADDRESS", ""))
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = os.environ.get("RAY_ADDRESS", "this machine")
        raise UserError(
            f"no Ray cluster at {where}: {first_line(error)}; a cluster whose 'ray start' reports "
            "token authentication needs RAY_AUTH_MODE=token"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray installs its own handler
    try:
        num_gpus = 0.0
        if tasks_per_gpu and ray.cluster_resources().get("GPU"):
            num_gpus = 1 / tasks_per_gpu
        task = ray.remote(_call).options(
            num_cpus=num_cpus, num_gpus=num_gpus, max_retries=MAX_RETRIES
        )
        shared = ray.put((function, os.getcwd()))
        running = {task.remote(shared, item): item for item in items}
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            item = running.pop(done)
            try:
                result = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise UserError(
                    f"the worker of task {item} died {MAX_RETRIES + 1} times, possibly for lack of "
                    f"memory: {first_line(error)}"
                ) from error
            yield result
    finally:
        ray.shutdown()


def _require_reachable(address: str) -> None:
    """Raise UserError unless HOST:PORT accepts a connection; Ray would retry for 14 minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:
        return  # "auto", "local", or no address
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"RAY_ADDRESS={address} cannot be reached ({first_line(error)}); correct it, or unset "
            "it to start Ray on this machine"
        ) from error


def _call(shared: tuple[Callable[[Any], Any], str], item: Any) -> Any:
    function, working_folder = shared
    try:
        os.chdir(working_folder)
    except OSError as error:
        raise UserError(
            f"cannot enter {working_folder} on {socket.gethostname()} ({error.strerror}): all "
            "machines of the Ray cluster must share the working folder, and the files that the "
            "command reads and writes, under the same paths"
        ) from error
    return function(item)
