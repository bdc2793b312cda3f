"""Tensors that report ``cuda:i`` and lie in the CPU's memory.

Every operation passes through :func:`dispatch`. It raises the errors that CUDA would raise, counts
the operations for which the host would wait, and computes the result on the CPU, so that losses are
correct.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.simulated_cuda.synchronizations import Synchronizations

aten = torch.ops.aten

COPIES = {aten.copy_.default, aten.copy.default}
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
"""Operations whose second argument is a list of indices, which may be on the host."""
RESULT_READ_BY_HOST = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
}
"""Operations after which the host waits for a value or a shape."""


@dataclasses.dataclass
class Device:
    """State of the simulated device in this process.

    Attributes:
        count: number of visible devices.
        current: index of the current device.
        synchronizations: host synchronizations counted so far.
        host_groups: names of the process groups that accept host tensors.
        is_saving: whether ``torch.save`` is running; its files are loaded with a ``map_location``.
    """

    count: int = 1
    current: int = 0
    synchronizations: Synchronizations = dataclasses.field(default_factory=Synchronizations)
    host_groups: set[str] = dataclasses.field(default_factory=set)
    is_saving: bool = False
    _pinned: dict[int, weakref.ref[torch.Tensor]] = dataclasses.field(default_factory=dict)

    def set_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark the memory of ``tensor`` as pinned while this tensor object exists."""
        self._pinned[tensor.untyped_storage().data_ptr()] = weakref.ref(tensor)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in pinned memory."""
        owner = self._pinned.get(tensor.untyped_storage().data_ptr())
        return owner is not None and owner() is not None


DEVICE = Device()


class DeviceTensor(torch.Tensor):
    """A tensor of ``cuda:index`` in the CPU's memory.

    The object keeps no reference to a CPU tensor, because ``tensor.data = other`` would not change
    this reference. Instead, :func:`on_host` makes a CPU tensor from the storage for every
    operation.
    """

    device_index: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: torch.Tensor, index: int) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_subclass(
            cls,
            host,
            False,
            dispatch_device=True,
            device_for_backend_keys=torch.device("cuda", index),
        )
        made.device_index = index
        return made

    @classmethod
    def __torch_dispatch__(cls, function, _types, arguments=(), keywords=None):
        return dispatch(function, arguments, keywords or {})

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, cuda:{self.device_index})"

    def __reduce_ex__(self, protocol):
        """Pickle the device index; as in CUDA, any rank unpickles the tensor on this device."""
        with torch._C._DisableTorchDispatch():
            host = on_host(self).clone()
        if DEVICE.is_saving:
            return host.__reduce_ex__(protocol)
        DEVICE.synchronizations.add("pickled device tensor")
        return _unpickle, (host, self.device_index)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, **_options: Any):
        raise TypeError(
            f"can't convert cuda:{self.device_index} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    __array__ = numpy  # type: ignore[assignment]


def _unpickle(host: torch.Tensor, index: int) -> DeviceTensor:
    if index != DEVICE.current:
        raise RuntimeError(
            f"the rank of cuda:{DEVICE.current} unpickles a tensor of cuda:{index}, which would "
            "create a context on that device"
        )
    return DeviceTensor(host, index)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor on the same memory."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=tensor.dtype).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


class DispatchMode(TorchDispatchMode):
    """Dispatch also the operations that have no :class:`DeviceTensor` among their arguments."""

    def __torch_dispatch__(self, function, _types, arguments=(), keywords=None):
        return dispatch(function, arguments, keywords or {})


def dispatch(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Compute ``function`` on the CPU under CUDA's rules.

    Raises:
        RuntimeError: if CUDA would raise an error, such as for tensors of two devices.
    """
    if function is torch.ops.prim.device.default:
        return torch.device("cuda", arguments[0].device_index)
    tensors = [t for t in tree_flatten((arguments, keywords))[0] if isinstance(t, torch.Tensor)]
    device_tensors = [t for t in tensors if isinstance(t, DeviceTensor)]
    host_tensors = [t for t in tensors if not isinstance(t, DeviceTensor)]
    if function.namespace == "c10d" and host_tensors:
        _check_collective(function, arguments)
    target = None if keywords.get("device") is None else torch.device(keywords["device"])
    if not device_tensors and (target is None or target.type != "cuda"):
        return _compute_on_host(function, arguments, keywords)
    index = _device_index(function, device_tensors, target)
    if function.namespace != "c10d" and device_tensors and host_tensors:
        _check_host_tensors(function, arguments, host_tensors, index)
    _count_waits(function, arguments, keywords, target)
    return _compute(function, arguments, keywords, index, target)


def _compute_on_host(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    if not keywords.get("pin_memory"):
        return function(*arguments, **keywords)
    return DEVICE.set_pinned(function(*arguments, **{**keywords, "pin_memory": False}))


def _compute(
    function: Any,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    index: int,
    target: torch.device | None,
) -> Any:
    """Call ``function`` with CPU tensors on the arguments' memory; wrap the results.

    If an in-place operation returns one of its arguments, the result is the same object.
    """
    wrappers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def unwrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        host = on_host(value) if isinstance(value, DeviceTensor) else value
        wrappers[id(host)] = (value, host)
        return host

    to_host = target is not None and target.type == "cpu"

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in wrappers:
            return wrappers[id(value)][0]
        if not to_host:
            return DeviceTensor(value, index)
        # A non-blocking copy to the host returns a tensor in pinned memory.
        return DEVICE.set_pinned(value) if keywords.get("non_blocking") else value

    options = {k: v for k, v in keywords.items() if k != "pin_memory"}
    if target is not None:
        options["device"] = torch.device("cpu")
    if function is aten._to_copy.default:
        options.pop("non_blocking", None)
    result = function(*tree_map(unwrap, arguments), **tree_map(unwrap, options))
    for wrapper, host in wrappers.values():
        _follow(wrapper, host)
    return tree_map(wrap, result)


def _follow(wrapper: torch.Tensor, host: torch.Tensor) -> None:
    """Apply to ``wrapper`` the shape that resize_ or set_ gave the CPU tensor."""
    if not isinstance(wrapper, DeviceTensor):
        return
    if wrapper.shape != host.shape or wrapper.stride() != host.stride():
        with torch._C._DisableTorchDispatch():
            wrapper.data = DeviceTensor(host, wrapper.device_index)


def _device_index(
    function: Any, device_tensors: Sequence[DeviceTensor], target: torch.device | None
) -> int:
    indices = {tensor.device_index for tensor in device_tensors}
    if len(indices) > 1:
        found = ", ".join(f"cuda:{index}" for index in sorted(indices))
        raise RuntimeError(f"Expected all tensors to be on the same device: {found} ({function})")
    if target is None or target.type != "cuda":
        return indices.pop()
    index = DEVICE.current if target.index is None else target.index
    if index >= DEVICE.count:
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
    if index != DEVICE.current:
        raise RuntimeError(f"{function} on cuda:{index}, not on this rank's cuda:{DEVICE.current}")
    return index


def _check_collective(function: Any, arguments: Sequence[Any]) -> None:
    """Reject host tensors, as NCCL does."""
    if function is torch.ops.c10d.barrier.default:
        return
    groups = (value for value in arguments if isinstance(value, torch.ScriptObject))
    names = {
        torch.distributed.ProcessGroup.unbox(group).group_name
        for group in groups
        if "ProcessGroup" in str(group._type())
    }
    if not names & DEVICE.host_groups:
        raise RuntimeError(f"No backend type associated with device type cpu ({function})")


def _check_host_tensors(
    function: Any, arguments: Sequence[Any], host_tensors: Sequence[torch.Tensor], index: int
) -> None:
    """Reject host tensors other than numbers, indices and sources of copies, as CUDA does."""
    if function in COPIES:
        return
    if function in INDEXING:
        if not isinstance(arguments[0], DeviceTensor):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        if any(
            isinstance(t, torch.Tensor) and not isinstance(t, DeviceTensor) for t in arguments[1]
        ):
            DEVICE.synchronizations.add("index copied from the host")
        return
    if any(tensor.dim() > 0 for tensor in host_tensors):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:{index} and cpu! ({function})"
        )


def _count_waits(
    function: Any,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    target: torch.device | None,
) -> None:
    count = DEVICE.synchronizations.add
    if function in RESULT_READ_BY_HOST:
        count(function.name().removeprefix("aten::"))
    elif function in INDEXING:
        value = arguments[2] if len(arguments) > 2 else None
        # If the value is a host scalar, torch calls masked_fill, which does not synchronize.
        is_filling = isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor)
        masks = (i for i in arguments[1] if isinstance(i, DeviceTensor))
        if not is_filling and any(mask.dtype in (torch.bool, torch.uint8) for mask in masks):
            count("index by a mask")
    elif function is aten._to_copy.default and target is not None:
        _count_copy(arguments[0], target.type, bool(keywords.get("non_blocking")), None)
    elif function in COPIES:
        destination, source, *more = arguments
        non_blocking = bool(more[0] if more else keywords.get("non_blocking"))
        kind = "cuda" if isinstance(destination, DeviceTensor) else "cpu"
        _count_copy(source, kind, non_blocking, destination)


def _count_copy(
    source: torch.Tensor, target: str, non_blocking: bool, destination: torch.Tensor | None
) -> None:
    from_device = isinstance(source, DeviceTensor)
    if from_device == (target == "cuda"):
        return
    if from_device:
        waits = not non_blocking or (destination is not None and not DEVICE.is_pinned(destination))
        kind = "copy to the host"
    else:
        waits = not non_blocking or not DEVICE.is_pinned(source)
        kind = "copy from the host" + (" (not pinned)" if non_blocking else "")
    if waits:
        DEVICE.synchronizations.add(kind)
