"""A simulated CUDA device, which computes on the CPU under CUDA's rules.

After :func:`install`, ``torch.cuda.is_available()`` is True in this process and the project takes
every CUDA branch, with gloo in place of NCCL. Operations that CUDA rejects fail here, too:
operations on tensors of two devices, NCCL collectives on host tensors, ``.numpy()`` of device
tensors, the use of another rank's device, and pinning a tensor whose elements overlap. Host
synchronizations are counted in ``DEVICE.synchronizations``. CONTRIBUTING.md lists the errors that
this simulation cannot detect.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.simulated_cuda.synchronizations import FLEX_ATTENTION, FORWARD_PASS, TRAINING_STEP
from tests.simulated_cuda.tensors import DEVICE, DeviceTensor, DispatchMode
from tests.simulated_cuda.torch_internals import register_cuda

NAME = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)
MEMORY_BYTES, ALLOCATED_BYTES = 80 * 2**30, 2**30
GENERATOR_STATE_BYTES = 16  # bytes of the seed and of the offset
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


def install() -> None:
    """Install the device in this process, permanently, before megatron.core is imported."""
    register_cuda(lambda: DEVICE.current)
    _patch_torch_cuda()
    _move_parameters_as_new_ones()
    _recognize_saving()
    _patch_process_groups()
    # Otherwise torch.tensor(..., device="cuda") would copy without calling the dispatch mode.
    torch._C._set_only_lift_cpu_tensors(True)
    DispatchMode().__enter__()
    # The device uses the CPU's generator, so hide Megatron's warning that this generator has
    # advanced.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def mark_steps_and_passes() -> None:
    """Mark training steps and forward passes in ``DEVICE.synchronizations``, permanently."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.transformer_layer import TransformerLayer

    first_layers: list[torch.nn.Module] = []
    step = OptimizerParamScheduler.step

    def mark_step(scheduler: Any, increment: int) -> None:
        step(scheduler, increment)
        DEVICE.synchronizations.mark(TRAINING_STEP)

    def mark_pass(module: torch.nn.Module, _arguments: Any) -> None:
        if not first_layers and isinstance(module, TransformerLayer):
            first_layers.append(module)
        if module in first_layers:
            DEVICE.synchronizations.mark(FORWARD_PASS)

    OptimizerParamScheduler.step = mark_step
    torch.nn.modules.module.register_module_forward_pre_hook(mark_pass)


def interpret_kernels() -> None:
    """Run kernels in Triton's interpreter, which TRITON_INTERPRET=1 selects at Triton's import."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def checked(executor: Any, *arguments: Any, **keywords: Any) -> None:
        for value in (*arguments, *keywords.values()):
            if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        with DEVICE.synchronizations.paused():
            run(executor, *arguments, **keywords)

    GridExecutor.__call__ = checked


def hide_triton() -> None:
    """Make ``import triton`` fail, since Triton would look for a CUDA driver."""
    sys.modules["triton"] = None  # type: ignore[assignment]
    # Kernels of MoE, which megatron-core imports unconditionally since 0.18.
    for name in ("paged_stash", "ops.paged_stash"):
        sys.modules[f"megatron.core.transformer.moe.{name}"] = mock.MagicMock()


def replace_flex_attention() -> None:
    """Compute flex attention with torch's plain operations: the device cannot compile it.

    Its calls are marked in ``DEVICE.synchronizations``.
    """
    from megatron_chameleon.model import document_attention
    from tests.block_masks import attention_of_blocks

    def marked(*heads: torch.Tensor, **options: Any) -> torch.Tensor:
        DEVICE.synchronizations.mark(FLEX_ATTENTION)
        return attention_of_blocks(*heads, **options)

    document_attention.compiled_flex_attention = marked


def _move_parameters_as_new_ones() -> None:
    """Make Module.to() create new parameters: setting ``.data`` would not change their device."""
    apply = torch.nn.Module._apply

    def apply_to_new(self: torch.nn.Module, function: Any, recurse: bool = True) -> Any:
        for name, old in self._parameters.items():
            if old is None or isinstance(old, DeviceTensor):
                continue
            with torch.no_grad():
                moved = function(old)
            if isinstance(moved, DeviceTensor):
                new: Any = moved.detach().requires_grad_(old.requires_grad)
                # Copy the attributes that Megatron sets, such as those that describe sharding.
                vars(new).update(
                    {**vars(old), "device_index": moved.device_index, "_is_param": True}
                )
                self._parameters[name] = new
        return apply(self, function, recurse)

    torch.nn.Module._apply = apply_to_new  # type: ignore[method-assign]


def _recognize_saving() -> None:
    save = torch.save

    def recognized(*arguments: Any, **options: Any) -> None:
        DEVICE.is_saving = True
        try:
            save(*arguments, **options)
        finally:
            DEVICE.is_saving = False

    torch.save = recognized


def _patch_process_groups() -> None:
    """Replace NCCL by gloo on the tensors' CPU memory; record the groups that requested gloo."""
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
            options.pop("pg_options", None)  # NCCL's options do not apply to gloo
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
    # Object collectives pickle objects into tensors, which NCCL requires on the device.
    distributed_c10d._get_object_coll_device = lambda group=None: device_of(group).type
    distributed_c10d._get_pg_default_device = device_of
    dist.is_nccl_available = lambda: True


def _real(backend: str | None) -> str | None:
    return "gloo" if backend == "nccl" else backend


def _note(group: Any, backend: str | None) -> None:
    if isinstance(group, dist.ProcessGroup):  # ranks outside the group get no ProcessGroup
        names = DEVICE.host_groups
        (names.discard if backend == "nccl" else names.add)(group.group_name)


def _is_nccl(group: Any) -> bool:
    group = dist.group.WORLD if group is None else group
    return group.group_name not in DEVICE.host_groups


class Stream:
    """A stream without asynchronous work."""

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
        """Elapsed milliseconds between two events with ``enable_timing``."""
        if not (self._is_timed and end._is_timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return 1000 * (end._recorded - self._recorded)


class Generator:
    """A CUDA generator, whose state is a host ByteTensor."""

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


def _patch_torch_cuda() -> None:
    """Replace the functions of torch that need a CUDA build, permanently."""
    replaced = {**_device_functions(), **_stream_functions(), **_memory_functions()}
    replaced |= _random_functions()
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
        for name, value in replaced.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    torch.cuda.nccl.version = lambda: (2, 27, 7)
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_flash_attention_available = lambda: True
    # Call torch's own pin_memory on the host's allocator, since it keeps strides and rejects
    # overlaps.
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
