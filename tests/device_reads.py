"""Count host synchronizations with a GPU on a machine without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ReadsOfValues(TorchDispatchMode):
    """Count the operations that make the host wait for a value from the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, _types, arguments=(), more=None):
        self.count += function in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
            torch.ops.aten.bincount.default,
        )
        return function(*arguments, **(more or {}))


def device_reads(
    step: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    on_host: Sequence[torch.Tensor] = (),
) -> int:
    """Return the number of host synchronizations that ``step`` would cause on a GPU.

    A dispatch mode does not intercept ``torch.tensor(tensors)`` and ``tolist``, so these calls are
    counted separately. Tensors that share memory with ``on_host`` count as host tensors.
    """
    construct, as_list = torch.tensor, torch.Tensor.tolist
    here = {part.untyped_storage().data_ptr() for part in on_host}
    seen: list[torch.Tensor] = []

    def constructing(data, **more):
        seen.extend(leaf for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor))
        return construct(data, **more)

    def listing(tensor):
        seen.append(tensor)
        return as_list(tensor)

    with monkeypatch.context() as patched, ReadsOfValues() as read:
        patched.setattr(torch, "tensor", constructing)
        patched.setattr(torch.Tensor, "tolist", listing)
        step()
    return read.count + sum(part.untyped_storage().data_ptr() not in here for part in seen)
