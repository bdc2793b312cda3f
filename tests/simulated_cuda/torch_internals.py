"""Provide the CUDA interfaces that torch's C++ code requires, in a CPU build of torch.

Autograd needs a device guard and an available accelerator to run backward passes of CUDA tensors,
and pinning needs an allocator; a CPU build of torch has neither. The device guard and the CUDA
hooks are C++ objects with virtual functions. This module replaces their virtual tables by copies in
which a few slots point to Python functions. The slots are those of torch 2.13, so nothing is
replaced if :func:`unsupported_reason` returns a reason.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

TORCH_VERSION = "2.13"
CUDA_DEVICE_TYPE = 1  # c10::DeviceType::CUDA
# Slots of c10::impl::DeviceGuardImplInterface and at::CUDAHooksInterface.
EXCHANGE_DEVICE, GET_DEVICE = 3, 4
IS_BUILT, IS_AVAILABLE, HAS_PRIMARY_CONTEXT, INIT = 2, 3, 4, 5
PINNED_MEMORY_ALLOCATOR, HAS_CUDA = 12, 16
GUARD_SLOTS, HOOKS_SLOTS = 38, 78
RTTI_SLOTS = 2  # number of slots before the slot to which objects point

_referenced_by_cpp: list[Any] = []


def unsupported_reason() -> str | None:
    """Reason that the simulated device is not supported here, or None."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "this build of torch supports GPUs"
    if torch.__version__.split("+")[0].rpartition(".")[0] != TORCH_VERSION:
        return f"the simulated device needs torch {TORCH_VERSION}, and this is {torch.__version__}"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the simulated device needs the C++ ABI of Linux on x86-64"
    return None


def register_cuda(current_device: Callable[[], int]) -> None:
    """Make CUDA available to autograd and the pinned allocator, permanently.

    Args:
        current_device: the index of the thread's current device.
    """
    reason = unsupported_reason()
    assert reason is None, reason
    libraries = Path(torch.__path__[0]) / "lib"
    c10 = ctypes.CDLL(str(libraries / "libc10.so"))
    torch_cpu = ctypes.CDLL(str(libraries / "libtorch_cpu.so"))
    _register_guard(c10, current_device)
    _replace_hooks(c10, torch_cpu)


def _register_guard(c10: ctypes.CDLL, current_device: Callable[[], int]) -> None:
    registry = (ctypes.c_void_p * 22).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    assert registry[CUDA_DEVICE_TYPE] is None
    # Register a guard that reports no devices, for which torch substitutes its own no-op guard.
    # Then replace some slots of the no-op guard.
    table = (ctypes.c_void_p * 64)(*[_function(lambda *_: 0)] * 64)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(table))
    _referenced_by_cpp.extend([table, guard])
    registry[CUDA_DEVICE_TYPE] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    # A c10::Device is returned in two bytes: its type, and its index.
    device = _function(lambda *_: CUDA_DEVICE_TYPE | current_device() << 8)
    _replace_slots(
        registry[CUDA_DEVICE_TYPE], GUARD_SLOTS, {EXCHANGE_DEVICE: device, GET_DEVICE: device}
    )


def _replace_hooks(c10: ctypes.CDLL, torch_cpu: ctypes.CDLL) -> None:
    hooks = torch_cpu._ZN2at6detail12getCUDAHooksEv
    host_allocator = c10._ZN3c1015GetCPUAllocatorEv
    hooks.restype = host_allocator.restype = ctypes.c_void_p
    allocator = host_allocator()
    yes, nothing = _function(lambda *_: 1), _function(lambda *_: 0)
    slots = dict.fromkeys((IS_BUILT, IS_AVAILABLE, HAS_PRIMARY_CONTEXT, HAS_CUDA), yes)
    slots |= {INIT: nothing, PINNED_MEMORY_ALLOCATOR: _function(lambda *_: allocator)}
    _replace_slots(hooks(), HOOKS_SLOTS, slots)


def _function(function: Callable[..., int]) -> int:
    """The address of a C function that calls ``function``."""
    native = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(function)
    _referenced_by_cpp.append(native)
    address = ctypes.cast(native, ctypes.c_void_p).value
    assert address is not None
    return address


def _replace_slots(instance: int | None, size: int, slots: Mapping[int, int]) -> None:
    """Replace the virtual table of the C++ object at ``instance`` by a copy with new ``slots``."""
    assert instance is not None
    pointer = ctypes.cast(instance, ctypes.POINTER(ctypes.c_void_p))
    pointer_bytes = ctypes.sizeof(ctypes.c_void_p)
    first = pointer[0]
    assert first is not None
    array = ctypes.c_void_p * (RTTI_SLOTS + size)
    copy = array(*array.from_address(first - RTTI_SLOTS * pointer_bytes))
    for slot, address in slots.items():
        copy[RTTI_SLOTS + slot] = address
    _referenced_by_cpp.append(copy)
    pointer[0] = ctypes.addressof(copy) + RTTI_SLOTS * pointer_bytes
