"""What acceleration is active here, what is lost without the rest, and what has run on a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from megatron_chameleon.parallel.cpu import unusable_gpu
from megatron_chameleon.parallel.cuda_coverage import Coverage, Place, cuda_coverage
from megatron_chameleon.parallel.triton_probe import triton_problem

State = Literal["active", "available", "unused", "absent", "broken", "wrong package"]

# NVIDIA's Apex has these subpackages; the unrelated project that has its name on the package index
# has neither.
APEX_SUBPACKAGES = ("optimizers", "normalization")
_HEADINGS: dict[Place, str] = {
    "real device": "Has run on a CUDA device:",
    "pretended device": "Has run on a pretended CUDA device only (tests/pretended_cuda):",
    "never": "Has never run on a CUDA device:",
}
_TF32_VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
# The layers are megatron-core's plain ones, with torch's norms.
ONLY_ADAM = "of it, megatron-core takes FusedAdam alone"


@dataclasses.dataclass(frozen=True)
class Feature:
    """One kind of acceleration: whether it is used, on what, and what its absence costs."""

    name: str
    state: State
    detail: str
    without: str


@dataclasses.dataclass(frozen=True)
class AccelerationReport:
    """Everything the doctor found."""

    torch_version: str
    cuda_devices: tuple[str, ...]
    features: tuple[Feature, ...]
    coverage: tuple[Coverage, ...] = ()


def acceleration_report(root: Path) -> AccelerationReport:
    """Look at this process's torch and packages. Nothing is changed and nothing is raised.

    Args:
        root: the checkout whose tests tell what has run on a CUDA device.
    """
    return AccelerationReport(
        torch_version=torch.__version__,
        cuda_devices=_cuda_devices(),
        features=(
            _cuda(),
            _float32(),
            _bfloat16(),
            _flash_attention(),
            _transformer_engine(),
            nvidia_apex(),
            _triton(),
            _fused_adam(),
            _nccl(),
        ),
        coverage=cuda_coverage(root),
    )


def format_report(report: AccelerationReport, width: int = 100) -> str:
    """The report as text: a line per feature, what is lost without it, then what has run where."""
    lines = [f"torch {report.torch_version}"]
    lines += [f"  device {index}: {name}" for index, name in enumerate(report.cuda_devices)]
    lines.append("")
    for feature in report.features:
        lines.append(f"{feature.name:20} {feature.state:14} {feature.detail}")
        if feature.state not in ("active", "available"):
            lines += textwrap.wrap(
                f"without it: {feature.without}",
                width,
                initial_indent=" " * 21,
                subsequent_indent=" " * 33,
            )
    for place, heading in _HEADINGS.items():
        covered = [row for row in report.coverage if row.place == place]
        if covered:
            lines += ["", heading]
            lines += [f"  - {row.feature} {row.device}".rstrip() for row in covered]
    return "\n".join(lines)


def nvidia_apex() -> Feature:
    """NVIDIA's Apex, told from the unrelated project of that name without importing either."""
    name = "NVIDIA's Apex"
    without = "fused norms and gradient_accumulation_fusion; torch's own kernels do the work"
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Feature(name, "absent", "not installed", without)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not all(any((f / sub).is_dir() for f in folders) for sub in APEX_SUBPACKAGES):
        detail = (
            f"apex {_version('apex')} in {folders[0] if folders else spec.origin} is another "
            "project of that name, which megatron-core takes for NVIDIA's: pip uninstall apex"
        )
        return Feature(name, "wrong package", detail, without)
    used_for = "its FusedAdam, and gradient_accumulation_fusion where it was built with that"
    return _importable(name, "apex", "apex.optimizers", without, used_for)


def _cuda_devices() -> tuple[str, ...]:
    names = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = device.total_memory / 2**30
        names.append(f"{device.name}, sm_{device.major}{device.minor}, {memory:.0f} GiB")
    return tuple(names)


def _cuda() -> Feature:
    without = "all runs on the CPU over gloo, with a stand-in for the torch.cuda calls: for trying"
    if torch.cuda.is_available():
        detail = f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} device(s)"
        return Feature("CUDA", "active", detail, without)
    problem = unusable_gpu()
    if problem is not None:
        return Feature("CUDA", "broken", problem, without)
    if torch.version.cuda is None:
        return Feature("CUDA", "absent", "this torch is built for the CPU alone", without)
    detail = f"torch is built for CUDA {torch.version.cuda} but sees no device"
    return Feature("CUDA", "absent", detail, without)


def _float32() -> Feature:
    """Whether fp32 is fp32; parallel/layout.py sees to it in every tool."""
    without = "fp32 training computes in fp32, at a fraction of TF32's speed; use --bf16 for speed"
    if torch.get_float32_matmul_precision() == "highest":
        return Feature("TF32", "unused", "this torch does not ask for it", without)
    detail = f"{_TF32_VARIABLE}={os.environ.get(_TF32_VARIABLE, '')} allows it; the tools reset it"
    return Feature("TF32", "unused", detail, without)


def _bfloat16() -> Feature:
    without = "train in fp32, at half the speed or less; bf16 on a CPU works and is for tests"
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
        return Feature("bf16", "available", "give --bf16 to train with it", without)
    detail = "the device has no bf16 units" if torch.cuda.is_available() else "no CUDA device"
    return Feature("bf16", "absent", detail, without)


def _flash_attention() -> Feature:
    name = "flash attention"
    without = "scaled_dot_product_attention falls back to a slower kernel with the same result"
    if not torch.cuda.is_available():
        return Feature(name, "absent", "no CUDA device; torch's CPU kernel is used", without)
    built = torch.backends.cuda.is_flash_attention_available()
    if built and torch.backends.cuda.flash_sdp_enabled():
        return Feature(name, "available", "torch's own, for --bf16; fp32 takes another", without)
    detail = "switched off" if built else "this torch was built without it"
    return Feature(name, "unused", detail, without)


def _transformer_engine() -> Feature:
    without = (
        "no FP8 or FP4, no context parallelism, no packed sequences, no overlap of tensor-parallel "
        "communication; nothing that the shipped configurations use"
    )
    module = "transformer_engine.pytorch"
    return _importable("Transformer Engine", "transformer_engine", module, without, ONLY_ADAM)


def _triton() -> Feature:
    without = (
        "no --compile-layers; the cross entropy and pooling by torch, in several passes over memory"
    )
    used_for = "the cross entropy, pooling; --compile-layers where asked for"
    feature = _importable("Triton", "triton", "triton", without, used_for)
    problem = triton_problem() if feature.state == "available" else None
    return dataclasses.replace(feature, state="broken", detail=problem) if problem else feature


def _fused_adam() -> Feature:
    """Which Adam megatron-core picked when it was imported."""
    name = "fused Adam"
    without = "parameters are updated one after the other"
    try:
        adam = importlib.import_module("megatron.core.optimizer").Adam
    except (ImportError, OSError, RuntimeError) as error:
        return Feature(name, "broken", f"megatron-core: {_first_line(error)}", without)
    if adam.__module__.startswith("torch."):
        state: State = "active" if torch.cuda.is_available() else "available"
        return Feature(name, state, "torch's AdamW, fused, whatever the device", without)
    return Feature(name, "active", f"{adam.__module__}.{adam.__name__}", without)


def _nccl() -> Feature:
    without = "ranks talk over gloo: a single GPU is all that makes sense"
    if not torch.distributed.is_nccl_available():
        return Feature("NCCL", "absent", "this torch was built without it", without)
    if torch.cuda.device_count() < 2:
        return Feature("NCCL", "unused", "fewer than two CUDA devices here", without)
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    return Feature("NCCL", "active", version, without)


def _importable(name: str, package: str, module: str, without: str, used_for: str) -> Feature:
    """A package whose ``module`` imports, and what it is used for on a CUDA device."""
    if importlib.util.find_spec(package) is None:
        return Feature(name, "absent", "not installed", without)
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return Feature(name, "broken", f"does not import: {_first_line(error)}", without)
    if not torch.cuda.is_available():
        return Feature(name, "unused", f"{_version(package)}, but there is no CUDA device", without)
    return Feature(name, "available", f"{_version(package)}: {used_for}", without)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
