"""Count the bytes of torch.distributed's collectives in a block of code."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "send": "send",
    "recv_": "recv",
    "broadcast_": "broadcast",
}
"""torch's name of an operation -> the collective."""
FEW = 16
"""Messages of at most this many numbers are not counted: losses, gradient norm and flags."""


class CountedCollectives(TorchDispatchMode):
    """Count the collectives of this rank within a ``with`` block, backward passes included.

    Attributes:
        calls: collective and ranks of its group ("all_reduce 0,1") -> number of calls. Sends
            and receives have no ranks, since megatron uses several groups for them.
        bytes: the same, with bytes of the whole tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        library, _, name = func._schema.name.partition("::")
        if library == "c10d":
            self._count(OPERATIONS[name], args)
        return func(*args, **(kwargs or {}))

    def _count(self, operation: str, arguments: tuple[Any, ...]) -> None:
        # The output comes before the input; the larger of both is the whole tensor.
        tensors = [_tensors(part) for part in arguments[:2]]
        size = max(sum(t.numel() for t in part) for part in tensors)
        if size <= FEW:
            return
        boxed = next(part for part in arguments if isinstance(part, torch.ScriptObject))
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed))
        if len(ranks) == 1:
            return
        key = operation
        if operation not in ("send", "recv"):
            key += " " + ",".join(map(str, ranks))
        self.calls[key] += 1
        self.bytes[key] += size * tensors[0][0].element_size()

    def write(self, path: Path) -> None:
        """Write calls and bytes as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"calls": self.calls, "bytes": self.bytes}))


def _tensors(argument: Any) -> list[torch.Tensor]:
    parts = argument if isinstance(argument, list | tuple) else [argument]
    return [part for part in parts if isinstance(part, torch.Tensor)]
