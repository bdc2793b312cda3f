"""Acceleration report of tools/doctor.py: active features, missing ones, GPU test coverage."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import textwrap
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from megatron_chameleon.parallel.cpu import unusable_gpu
from megatron_chameleon.parallel.triton_probe import triton_problem

State = Literal["active", "available", "unused", "absent", "broken", "wrong package"]
Place = Literal["real device", "pretended device", "never"]

COVERAGE_TABLE = Path("tests/cuda_coverage.toml")
GPU_TESTS, RESULTS = "tests/gpu", "benchmarks/results"
# NVIDIA's Apex has these subpackages; the unrelated project of that name has neither.
APEX_SUBPACKAGES = ("optimizers", "normalization")
_HEADINGS: dict[Place, str] = {
    "real device": "Has run on a CUDA device:",
    "pretended device": "Has run on a pretended CUDA device only (tests/pretended_cuda):",
    "never": "Has never run on a CUDA device:",
}
_TF32_VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
# The layers are megatron-core's plain ones, with torch's norms.
ONLY_ADAM = "megatron-core uses only its FusedAdam"


@dataclasses.dataclass(frozen=True)
class Feature:
    """One kind of acceleration: its state, details, and what its absence costs."""

    name: str
    state: State
    detail: str
    without: str


@dataclasses.dataclass(frozen=True)
class Coverage:
    """A CUDA feature, where it has run, and the names of the devices if they were real."""

    feature: str
    place: Place
    device: str = ""


@dataclasses.dataclass(frozen=True)
class AccelerationReport:
    """Acceleration features, devices and GPU test coverage."""

    torch_version: str
    cuda_devices: tuple[str, ...]
    features: tuple[Feature, ...]
    coverage: tuple[Coverage, ...] = ()


def acceleration_report(root: Path) -> AccelerationReport:
    """Inspect this process's torch and packages, without changing anything. Raises nothing.

    Args:
        root: checkout with the recorded results of the GPU tests.
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
    """Format the report: a line per feature, the cost of its absence, then what has run where."""
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
    """Find NVIDIA's Apex, as opposed to the unrelated project of that name, without an import."""
    name = "NVIDIA's Apex"
    without = "fused norms and gradient_accumulation_fusion; torch's own kernels do the work"
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Feature(name, "absent", "not installed", without)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not all(any((f / sub).is_dir() for f in folders) for sub in APEX_SUBPACKAGES):
        detail = (
            f"apex {_version('apex')} in {folders[0] if folders else spec.origin} is another "
            "project, which megatron-core mistakes for NVIDIA's: pip uninstall apex"
        )
        return Feature(name, "wrong package", detail, without)
    used_for = "its FusedAdam, and gradient_accumulation_fusion if built with it"
    return _importable(name, "apex", "apex.optimizers", without, used_for)


def cuda_coverage(root: Path) -> tuple[Coverage, ...]:
    """Read the table of CUDA features and their tests, and the recorded outcomes of GPU tests.

    A feature has run on a real device if all of its GPU tests passed on one.

    Args:
        root: a checkout of the repository; the result is empty in any other folder.
    """
    if not (root / COVERAGE_TABLE).is_file():
        return ()
    table = tomllib.loads((root / COVERAGE_TABLE).read_text(encoding="utf-8"))
    outcomes = _outcomes(root / RESULTS)
    found = []
    for row in table["feature"]:
        tests = [f"{GPU_TESTS}/{name}" for name in row["gpu"]]
        devices = [
            device for device, by_test in outcomes.items() if tests and _passed(tests, by_test)
        ]
        if devices:
            found.append(Coverage(row["name"], "real device", f"({', '.join(devices)})"))
        else:
            found.append(Coverage(row["name"], "pretended device" if row["pretended"] else "never"))
    return tuple(found)


def _outcomes(folder: Path) -> dict[str, dict[str, str]]:
    """Device -> outcome by test, as written by benchmarks/gpu_tests.py."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("tests-*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            found.setdefault(row["machine"]["device"], {}).update(row["tests"])
    return found


def _passed(tests: list[str], outcomes: dict[str, str]) -> bool:
    for test in tests:
        cases = [o for name, o in outcomes.items() if name == test or name.startswith(f"{test}[")]
        if not cases or set(cases) != {"passed"}:
            return False
    return True


def _cuda_devices() -> tuple[str, ...]:
    names = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = device.total_memory / 2**30
        names.append(f"{device.name}, sm_{device.major}{device.minor}, {memory:.0f} GiB")
    return tuple(names)


def _cuda() -> Feature:
    without = "everything runs on the CPU over gloo, which is for smoke tests"
    if torch.cuda.is_available():
        detail = f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} device(s)"
        return Feature("CUDA", "active", detail, without)
    problem = unusable_gpu()
    if problem is not None:
        return Feature("CUDA", "broken", problem, without)
    if torch.version.cuda is None:
        return Feature("CUDA", "absent", "this torch is built for the CPU only", without)
    detail = f"torch is built for CUDA {torch.version.cuda} but sees no device"
    return Feature("CUDA", "absent", detail, without)


def _float32() -> Feature:
    """Report whether fp32 means fp32; parallel/layout.py ensures it in every tool."""
    without = "fp32 training computes in fp32, at a fraction of TF32's speed; use --bf16 for speed"
    if torch.get_float32_matmul_precision() == "highest":
        return Feature("TF32", "unused", "this torch does not enable it", without)
    detail = f"{_TF32_VARIABLE}={os.environ.get(_TF32_VARIABLE, '')} allows it; the tools reset it"
    return Feature("TF32", "unused", detail, without)


def _bfloat16() -> Feature:
    without = "train in fp32, at half the speed or less; bf16 on a CPU works and is for tests"
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
        return Feature("bf16", "available", "pass --bf16 to train with it", without)
    detail = "the device has no bf16 units" if torch.cuda.is_available() else "no CUDA device"
    return Feature("bf16", "absent", detail, without)


def _flash_attention() -> Feature:
    name = "flash attention"
    without = "scaled_dot_product_attention falls back to a slower kernel with the same result"
    if not torch.cuda.is_available():
        return Feature(name, "absent", "no CUDA device; torch's CPU kernel is used", without)
    built = torch.backends.cuda.is_flash_attention_available()
    if built and torch.backends.cuda.flash_sdp_enabled():
        return Feature(name, "available", "torch's, for --bf16; fp32 uses another kernel", without)
    detail = "disabled" if built else "this torch was built without it"
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
    used_for = "the cross entropy, pooling, --compile-layers"
    feature = _importable("Triton", "triton", "triton", without, used_for)
    problem = triton_problem() if feature.state == "available" else None
    return dataclasses.replace(feature, state="broken", detail=problem) if problem else feature


def _fused_adam() -> Feature:
    """Find the Adam that megatron-core chose when it was imported."""
    name = "fused Adam"
    without = "parameters are updated one after the other"
    try:
        adam = importlib.import_module("megatron.core.optimizer").Adam
    except (ImportError, OSError, RuntimeError) as error:
        return Feature(name, "broken", f"megatron-core: {_first_line(error)}", without)
    if adam.__module__.startswith("torch."):
        state: State = "active" if torch.cuda.is_available() else "available"
        return Feature(name, state, "torch's fused AdamW", without)
    return Feature(name, "active", f"{adam.__module__}.{adam.__name__}", without)


def _nccl() -> Feature:
    without = "ranks communicate over gloo: use a single GPU"
    if not torch.distributed.is_nccl_available():
        return Feature("NCCL", "absent", "this torch was built without it", without)
    if torch.cuda.device_count() < 2:
        return Feature("NCCL", "unused", "fewer than two CUDA devices here", without)
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    return Feature("NCCL", "active", version, without)


def _importable(name: str, package: str, module: str, without: str, used_for: str) -> Feature:
    """Check that a package's ``module`` imports; ``used_for``: its purpose on a CUDA device."""
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
