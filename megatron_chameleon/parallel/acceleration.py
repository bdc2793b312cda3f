"""Acceleration report of the command doctor: active and missing features, and GPU test coverage."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Literal

import torch

from megatron_chameleon.errors import first_line
from megatron_chameleon.parallel.cpu import unusable_gpu
from megatron_chameleon.parallel.releases import import_problem, release_problem
from megatron_chameleon.parallel.triton_probe import triton_problem

State = Literal["active", "available", "unused", "absent", "broken", "wrong package"]

COVERAGE_TABLE = Path("tests/cuda_coverage.toml")
GPU_TESTS, RESULTS = "tests/gpu", "benchmarks/results"
# NVIDIA's Apex has these subpackages; the unrelated project named apex has neither.
APEX_SUBPACKAGES = ("optimizers", "normalization")
ON_GPU, ON_SIMULATED = "a CUDA device", "a simulated CUDA device only (tests/simulated_cuda)"
UNTESTED = "no device"


@dataclasses.dataclass(frozen=True)
class Feature:
    """Acceleration feature: its state, details, and the cost of its absence."""

    name: str
    state: State
    detail: str
    without: str


@dataclasses.dataclass(frozen=True)
class AccelerationReport:
    """Acceleration features, devices, and the CUDA features tested on each kind of device."""

    torch_version: str
    cuda_devices: list[str]
    features: list[Feature]
    coverage: dict[str, list[str]]


def acceleration_report(root: Path) -> AccelerationReport:
    """Inspect this process's torch and packages without changing anything. No error is raised.

    Args:
        root: checkout of the repository, with the recorded results of the GPU tests.
    """
    count, torch_cuda = torch.cuda.device_count(), torch.version.cuda
    cuda: tuple[State, str] = "active", f"CUDA {torch_cuda}, {count} device(s)"
    bf16: tuple[State, str] = "absent", "no CUDA device"
    flash: tuple[State, str] = "absent", "no CUDA device; torch's CPU kernel is used"
    nccl: tuple[State, str] = "absent", "this torch was built without NCCL"
    if torch.cuda.is_available():
        bf16 = "absent", "the device has no bf16 units"
        if torch.cuda.is_bf16_supported(including_emulation=False):
            bf16 = "available", "pass --bf16 to train with it"
        flash = "unused", "this torch was built without flash attention"
        if torch.backends.cuda.is_flash_attention_available():
            flash = "available", "torch's kernel, used with --bf16; fp32 uses another kernel"
    elif problem := unusable_gpu():
        cuda = "broken", problem
    elif torch_cuda is None:
        cuda = "absent", "this torch is built for the CPU only"
    else:
        cuda = "absent", f"torch is built for CUDA {torch_cuda} but sees no device"
    if torch.distributed.is_nccl_available():
        nccl = "unused", "fewer than two CUDA devices here"
        if count > 1:
            nccl = "active", ".".join(map(str, torch.cuda.nccl.version()))
    triton = _package("triton", "the cross entropy, pooling, compiled layers and attention")
    if triton[0] == "available" and (problem := triton_problem()):
        triton = "broken", problem
    apex = nvidia_apex()
    # Layers do not use Transformer Engine: they are megatron-core's own, with torch's norms.
    transformer_engine = _package("transformer_engine.pytorch", "used for FusedAdam only")
    return AccelerationReport(
        torch_version=torch.__version__,
        cuda_devices=[
            f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB"
            for device in map(torch.cuda.get_device_properties, range(count))
        ],
        features=[
            Feature("megatron-core", *_megatron_core(), "nothing is trained or embedded"),
            Feature("CUDA", *cuda, "everything runs on the CPU over gloo, for smoke tests only"),
            # parallel/layout.py disables TF32, regardless of the container's settings.
            Feature("TF32", "unused", "the tools disable TF32", "use --bf16 for speed"),
            Feature("bf16", *bf16, "training runs in fp32, at half the speed or less"),
            Feature("flash attention", *flash, "slower kernels with the same result"),
            Feature("Transformer Engine", *transformer_engine, "no FP8 or context parallelism"),
            Feature("NVIDIA's Apex", *apex, "no fused norms, no gradient_accumulation_fusion"),
            Feature("Triton", *triton, "no --compile-layers; slower cross entropy and pooling"),
            Feature("fused Adam", *_fused_adam(), "parameters are updated one after the other"),
            Feature("NCCL", *nccl, "ranks communicate over gloo: use a single GPU"),
        ],
        coverage=cuda_coverage(root),
    )


def format_report(report: AccelerationReport) -> str:
    """Format the report: a line per feature, the cost of its absence, then the test coverage."""
    lines = [f"torch {report.torch_version}"]
    lines += [f"  device {index}: {name}" for index, name in enumerate(report.cuda_devices)]
    lines.append("")
    for feature in report.features:
        lines.append(f"{feature.name:20} {feature.state:14} {feature.detail}")
        if feature.state not in ("active", "available"):
            lines.append(f"{'':21}without it: {feature.without}")
    for device, features in report.coverage.items():
        if features:
            lines += ["", f"Tested on {device}:", *(f"  - {name}" for name in features)]
    if not report.coverage:
        lines += [
            "",
            "Only a checkout lists the features that were tested on a CUDA device.",
        ]
    return "\n".join(lines)


def nvidia_apex() -> tuple[State, str]:
    """Find NVIDIA's Apex without importing the unrelated project of that name."""
    spec = importlib.util.find_spec("apex")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    if spec and not all(any((f / sub).is_dir() for f in folders) for sub in APEX_SUBPACKAGES):
        return "wrong package", (
            f"{folders[0] if folders else spec.origin} is another project of that name, which "
            "megatron-core mistakes for NVIDIA's: pip uninstall apex"
        )
    used_for = "FusedAdam, and gradient_accumulation_fusion if Apex was built with it"
    return _package("apex.optimizers", used_for)


def cuda_coverage(root: Path) -> dict[str, list[str]]:
    """List the CUDA features tested on a real device, on a simulated device, and on no device.

    A feature is tested on a real device if all of its GPU tests passed there, according to the
    outcomes recorded in ``root``, a checkout of the repository. The result is empty for any other
    folder.
    """
    if not (root / COVERAGE_TABLE).is_file():
        return {}
    table = tomllib.loads((root / COVERAGE_TABLE).read_text(encoding="utf-8"))
    # Maps device -> test -> outcome, as written by benchmarks/gpu_tests.py.
    outcomes: dict[str, dict[str, str]] = {}
    for path in sorted((root / RESULTS).glob("tests-*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            outcomes.setdefault(row["machine"]["device"], {}).update(row["tests"])

    def passed(test: str, by_test: dict[str, str]) -> bool:
        """Return whether all cases of a test passed."""
        path = f"{GPU_TESTS}/{test}"
        names = (name for name in by_test if name == path or name.startswith(f"{path}["))
        return {by_test[name] for name in names} == {"passed"}

    coverage: dict[str, list[str]] = {ON_GPU: [], ON_SIMULATED: [], UNTESTED: []}
    for row in table["feature"]:
        devices = [
            device
            for device, by_test in outcomes.items()
            if row["gpu"] and all(passed(test, by_test) for test in row["gpu"])
        ]
        if devices:
            coverage[ON_GPU].append(f"{row['name']} ({', '.join(devices)})")
        else:
            coverage[ON_SIMULATED if row["simulated"] else UNTESTED].append(row["name"])
    return coverage


def _megatron_core() -> tuple[State, str]:
    """Check the installed release."""
    if problem := release_problem():
        return "broken", problem
    try:
        importlib.import_module("megatron.core")
        return "active", importlib.metadata.version("megatron-core")
    except ImportError as error:
        return "broken", import_problem(error) or first_line(error)


def _fused_adam() -> tuple[State, str]:
    """Find the Adam implementation that megatron-core selected when it was imported."""
    try:
        adam = importlib.import_module("megatron.core.optimizer").Adam
    except (ImportError, OSError, RuntimeError) as error:
        return "broken", f"megatron-core: {first_line(error)}"
    if adam.__module__.startswith("torch."):
        return ("active" if torch.cuda.is_available() else "available"), "torch's fused AdamW"
    return "active", f"{adam.__module__}.{adam.__name__}"


def _package(module: str, used_for: str) -> tuple[State, str]:
    """Check that a package's ``module`` imports; ``used_for`` is its purpose on a CUDA device."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return "absent", "not installed"
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return "broken", f"does not import: {first_line(error)}"
    try:
        version = importlib.metadata.version(package)  # NVIDIA's Apex defines no __version__
    except importlib.metadata.PackageNotFoundError:
        version = "unknown version"
    if not torch.cuda.is_available():
        return "unused", f"{version}, but there is no CUDA device"
    return "available", f"{version}: {used_for}"
