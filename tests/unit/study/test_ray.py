"""Test tasks on Ray: retries of killed workers, and errors of tasks."""

import functools
import json
import os
import signal

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.study.ray import MAX_RETRIES, map_on_ray

pytestmark = pytest.mark.slow  # a start of Ray takes several seconds


@pytest.fixture(autouse=True)
def _own_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:x"])
def test_an_address_without_a_cluster_is_an_error_at_once(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=f"RAY_ADDRESS={address}"):
        list(map_on_ray(abs, [1]))


def killed_until(folder, item):
    """Log the start of ``item``; the first start of item 1 and every start of item 3 are killed."""
    with (folder / str(item)).open("a") as log:
        log.write("x")
    starts = (folder / str(item)).stat().st_size
    if item == 3 or (item == 1 and starts == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if item == 4:
        raise UserError("item 4 is wrong")
    return item * item


def test_only_the_task_of_a_killed_worker_starts_again(tmp_path):
    function = functools.partial(killed_until, tmp_path)
    assert sorted(map_on_ray(function, [0, 1, 2])) == [0, 1, 4]
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {
        "0": 1,
        "1": 2,
        "2": 1,
    }


def test_errors_of_tasks_are_raised_here(tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    function = functools.partial(killed_until, tmp_path)
    with pytest.raises(UserError, match="item 4 is wrong"):
        list(map_on_ray(function, [4]))
    with pytest.raises(UserError, match="task 3"):
        list(map_on_ray(function, [3]))
    assert (tmp_path / "3").stat().st_size == MAX_RETRIES + 1
    assert signal.getsignal(signal.SIGTERM) is handler


def assigned_gpu(item):
    import ray

    assigned = ray.get_runtime_context().get_assigned_resources()
    return assigned.get("GPU"), os.environ.get("CUDA_VISIBLE_DEVICES")


def test_tasks_get_a_share_of_a_gpu_if_the_cluster_has_one(monkeypatch):
    [(share, _)] = map_on_ray(assigned_gpu, [0], tasks_per_gpu=2)
    assert share is None
    # A GPU that exists only in Ray's schedule.
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"CPU": 2, "GPU": 1}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert list(map_on_ray(assigned_gpu, [0, 1], tasks_per_gpu=2)) == [(0.5, "0")] * 2
