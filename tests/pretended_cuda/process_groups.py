"""NCCL, pretended over gloo, which is given the memory of the device's tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.pretended_cuda.tensors import DEVICE


def patch_process_groups() -> None:
    """Take ``backend="nccl"``, and remember which groups are gloo's own, for good."""
    init_process_group, new_group = dist.init_process_group, dist.new_group

    def init(backend: str | None = None, *arguments: Any, device_id: Any = None, **options: Any):
        assert device_id is None or device_id.index == DEVICE.current, device_id
        init_process_group(_real(backend), *arguments, **options)
        _note(dist.group.WORLD, backend)

    def new(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, *arguments, **options
    ):
        options.pop("device_id", None)
        if backend in (None, "nccl"):
            options.pop("pg_options", None)  # NCCL's own
        group = new_group(ranks, timeout, _real(backend), *arguments, **options)
        _note(group, dist.get_backend() if backend is None else backend)
        return group

    def backend_of(group: Any = None) -> str:
        return "nccl" if _is_nccl(group) else "gloo"

    def device_of(group: Any = None) -> torch.device:
        return torch.device("cuda" if _is_nccl(group) else "cpu")

    for module in (dist, distributed_c10d):
        module.init_process_group, module.new_group = init, new  # type: ignore[attr-defined]
        module.get_backend = backend_of  # type: ignore[attr-defined]
    # Objects are pickled into tensors that NCCL takes.
    distributed_c10d._get_object_coll_device = lambda group=None: device_of(group).type
    distributed_c10d._get_pg_default_device = device_of
    dist.is_nccl_available = lambda: True


def _real(backend: str | None) -> str | None:
    return "gloo" if backend == "nccl" else backend


def _note(group: Any, backend: str | None) -> None:
    if isinstance(group, dist.ProcessGroup):  # not of those ranks that are no members
        names = DEVICE.host_groups
        (names.discard if backend == "nccl" else names.add)(group.group_name)


def _is_nccl(group: Any) -> bool:
    group = dist.group.WORLD if group is None else group
    return group.group_name not in DEVICE.host_groups
