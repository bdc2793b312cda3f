"""Check what the simulated device rejects and which operations synchronize the host.

test_training.py runs this file as a program, since a process cannot uninstall the device.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.simulated_cuda.tensors import DEVICE

CUDA = torch.device("cuda")


def waits() -> int:
    return sum(DEVICE.synchronizations.total.values())


def check_what_is_rejected() -> None:
    on_device, on_host = torch.ones(3, 2, device=CUDA), torch.ones(3, 2)
    for mixed in (
        lambda: on_device + on_host,
        lambda: on_device @ on_host.T,
        lambda: torch.cat([on_device, on_host]),
        lambda: on_host[torch.tensor([0, 1], device=CUDA)],
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        on_device.numpy()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:1")
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.arange(2).expand(3, 2).pin_memory()
    with pytest.raises(TypeError, match="ByteTensor"):
        torch.cuda.set_rng_state(torch.zeros(5056, dtype=torch.uint8))
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(on_device)
    with pytest.raises(RuntimeError, match="No backend type"):
        dist.all_reduce(on_host)
    dist.destroy_process_group()


def check_what_is_waited_for() -> None:
    on_device, pinned = torch.ones(3, 2, device=CUDA), torch.ones(3, 2).pin_memory()
    for wait in (
        lambda: on_device.sum().item(),
        lambda: bool(on_device.any()),
        lambda: on_device.cpu(),
        lambda: on_device.tolist(),
        lambda: on_device.nonzero(),
        lambda: on_device[on_device > 0],
        lambda: torch.ones(2).to(CUDA),
        lambda: torch.ones(2).to(CUDA, non_blocking=True),  # waits, since its source is not pinned
        lambda: torch.tensor([1, 2], device=CUDA),
        lambda: on_device.copy_(pinned),
        lambda: pickle.dumps(on_device),
        torch.cuda.synchronize,
    ):
        before = waits()
        wait()
        assert waits() == before + 1, wait
    before = waits()
    on_device.copy_(pinned, non_blocking=True)
    pinned.to(CUDA, non_blocking=True)
    pinned.copy_(on_device, non_blocking=True)
    on_device[on_device > 0] = 0.0
    on_device.mul_(2).add_(1.0).sum()
    copy.deepcopy(on_device)
    assert waits() == before


def check_that_numbers_are_real() -> None:
    weight = torch.nn.Linear(3, 2).to(CUDA).weight
    assert weight.device == torch.device("cuda", 0)
    assert weight.is_cuda
    loss = (weight * torch.arange(6.0, device=CUDA).view(2, 3)).sum()
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0, 1, 2], [3, 4, 5]]
    saved = io.BytesIO()
    torch.save(weight.detach(), saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved), weight.detach().cpu())


if __name__ == "__main__":
    check_what_is_rejected()
    check_what_is_waited_for()
    check_that_numbers_are_real()
