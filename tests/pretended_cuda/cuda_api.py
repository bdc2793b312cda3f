"""What Python asks ``torch.cuda`` for, answered for the pretended device."""

from __future__ import annotations

import collections
import contextlib
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.pretended_cuda.tensors import DEVICE, DeviceTensor

NAME = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)
MEMORY_BYTES, ALLOCATED_BYTES = 80 * 2**30, 2**30
GENERATOR_STATE_BYTES = 16  # seed and offset
PROPERTIES = types.SimpleNamespace(
    name=NAME,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=MEMORY_BYTES,
    multi_processor_count=132,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    L2_cache_size=50 * 2**20,
)


class Stream:
    """A stream of a device that computes in order."""

    def __init__(self, device: Any = None, priority: int = 0, **_options: Any) -> None:
        self.device = torch.device("cuda", DEVICE.current)
        self.cuda_stream = self.stream_id = id(self)

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        DEVICE.synchronizations.add("Stream.synchronize")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_error: object) -> None: ...


class Event:
    """A CUDA event, timed by the host's clock."""

    def __init__(self, enable_timing: bool = False, **_options: Any) -> None:
        self._is_timed, self._recorded = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._recorded = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        DEVICE.synchronizations.add("Event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds, of events with ``enable_timing`` only."""
        if not (self._is_timed and end._is_timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return 1000 * (end._recorded - self._recorded)


class Generator:
    """The state of a CUDA generator, which is a ByteTensor of the host."""

    def __init__(self) -> None:
        self._seed = self._offset = 0

    def manual_seed(self, seed: int) -> Generator:
        self._seed, self._offset = seed, 0
        return self

    def initial_seed(self) -> int:
        return self._seed

    def get_state(self) -> torch.Tensor:
        return torch.tensor([self._seed, self._offset], dtype=torch.int64).view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> Generator:
        is_bytes = state.dtype == torch.uint8 and state.numel() == GENERATOR_STATE_BYTES
        if isinstance(state, DeviceTensor) or not is_bytes:
            raise TypeError("RNG state must be a torch.ByteTensor of the generator's size")
        self._seed, self._offset = state.clone().view(torch.int64).tolist()
        return self

    graphsafe_get_state = get_state
    graphsafe_set_state = set_state


def patch_torch_cuda() -> None:
    """Replace what needs a CUDA build in ``torch.cuda`` and ``torch.Tensor``, for good."""
    replaced = {**_device_functions(), **_stream_functions(), **_memory_functions()}
    replaced |= _random_functions()
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
        for name, value in replaced.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    torch.cuda.nccl.version = lambda: (2, 27, 7)
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_flash_attention_available = lambda: True
    # torch's own pin_memory, by the host's allocator: it keeps strides and fails on overlaps.
    pin_memory = torch.Tensor.pin_memory
    tensor_class: Any = torch.Tensor
    tensor_class.pin_memory = lambda self, device=None: DEVICE.set_pinned(pin_memory(self))
    tensor_class.is_pinned = lambda self, device=None: DEVICE.is_pinned(self)
    tensor_class.record_stream = lambda self, stream: None


def _index_of(device: Any = None) -> int:
    if device is None or (isinstance(device, int) and device < 0):
        return DEVICE.current
    index = device if isinstance(device, int) else torch.device(device).index
    return DEVICE.current if index is None else index


def _device_functions() -> dict[str, Callable[..., Any]]:
    def set_device(device: Any) -> None:
        index = _index_of(device)
        if index >= DEVICE.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
        DEVICE.current = index

    def exchange_device(index: int) -> int:
        before, DEVICE.current = DEVICE.current, _index_of(index)
        return before

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_options: call(),
        "device_count": lambda: DEVICE.count,
        "current_device": lambda: DEVICE.current,
        "set_device": set_device,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: CAPABILITY,
        "is_bf16_supported": lambda including_emulation=True: True,
        "ipc_collect": lambda: None,
    }


def _stream_functions() -> dict[str, Any]:
    stream = Stream()

    @contextlib.contextmanager
    def in_stream(stream: Stream | None) -> Iterator[None]:
        yield

    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": in_stream,
        "set_stream": lambda stream: None,
        "synchronize": lambda device=None: DEVICE.synchronizations.add("torch.cuda.synchronize"),
    }


def _memory_functions() -> dict[str, Callable[..., Any]]:
    names = ("memory_allocated", "memory_reserved")
    counters = [name for kind in names for name in (kind, f"max_{kind}")]
    return {
        **dict.fromkeys(counters, lambda device=None: ALLOCATED_BYTES),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: collections.defaultdict(int),
        "mem_get_info": lambda device=None: (MEMORY_BYTES - ALLOCATED_BYTES, MEMORY_BYTES),
    }


def _random_functions() -> dict[str, Any]:
    generators: dict[int, Generator] = collections.defaultdict(Generator)

    def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
        generators[_index_of(device)].set_state(state)

    def seed_all(seed: int) -> None:
        for index in range(DEVICE.count):
            generators[index].manual_seed(seed)

    return {
        "default_generators": generators,
        "manual_seed": lambda seed: generators[DEVICE.current].manual_seed(seed),
        "manual_seed_all": seed_all,
        "initial_seed": lambda: generators[DEVICE.current].initial_seed(),
        "get_rng_state": lambda device="cuda": generators[_index_of(device)].get_state(),
        "set_rng_state": set_rng_state,
    }
