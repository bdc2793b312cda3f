"""Provenance and cost of artifacts."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts.record import Amount, Count, json_values

# User and password of a URL; in Azure's URLs, a container precedes the @.
_CREDENTIALS = re.compile(r"\b(?!(?:abfs|wasb)s?://)([a-z][\w+.-]*://)[^/\s?#'\"]*@", re.I)
# Parameters of signed URLs.
_SECRET_PARAMETER = re.compile(
    r"([?&](?:sig|key|awsaccesskeyid|(?:[\w-]*[-_])?(?:token|secret|signature|password|credentials?"
    r"|(?:access|api)[-_]?key(?:[-_]?id)?))=)[^&#\s,'\"]+",
    re.I,
)
# A path begins at the start of a word.
_START = r"(?<![^\s=,:'\"(\[])"
_ABSOLUTE_PATH = re.compile(_START + r"/(?!/)(?:[^\s=,:'\"/]+/+)*([^\s=,:'\"/]*)")
_FILE_URL = re.compile(r"\bfile://[^\s,'\"]*/")
PACKAGES = ("megatron-chameleon", "torch", "megatron-core", "numpy", "scipy", "tokenizers")


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Command, options, software versions and input hashes of an artifact.

    Paths in the options are relative to the working folder.
    """

    command: list[str]
    options: dict[str, Any]
    inputs: dict[str, str]
    versions: dict[str, str]
    git_commit: str | None
    created: str
    working_folder: str | None = None

    def portable(self) -> Provenance:
        """Copy for other machines, without absolute paths; see :meth:`portable_text`."""
        inputs: dict[str, str] = {}
        for name, digest in self.inputs.items():
            short = self.portable_text(name)
            inputs[name if short in inputs else short] = digest
        return dataclasses.replace(
            self,
            command=_mapped(self.command, self.portable_text),
            options=_mapped(self.options, self.portable_text),
            inputs=inputs,
            working_folder=None,
        )

    def portable_text(self, text: str) -> str:
        """Make paths in the working folder relative, and keep only the name of other paths.

        Credentials of URLs are removed, too.
        """
        text = _FILE_URL.sub("", without_credentials(text))
        if here := re.escape((self.working_folder or "").rstrip("/")):
            text = re.sub(rf"{_START}{here}(/|(?![^\s=,:'\"]))", "", text)
        if text.startswith("/"):  # the whole text is a path, which may contain spaces
            return Path(text).name
        return _ABSOLUTE_PATH.sub(r"\1", text)


def recorded_options(options: Any) -> dict[str, Any]:
    """The dataclass ``options`` as JSON values without the passwords and tokens of URLs."""
    body: dict[str, Any] = _mapped(json_values(options), without_credentials)
    return body


def without_credentials(text: str) -> str:
    """``text`` without the user, the password and the tokens of URLs."""
    return _SECRET_PARAMETER.sub(r"\1***", _CREDENTIALS.sub(r"\1", text))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """JSON values with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list) else value


def provenance(options: Any, inputs: dict[str, str]) -> Provenance:
    """Record the provenance of an artifact of this process.

    Args:
        options: the tool's options, a frozen dataclass.
        inputs: name of each input artifact -> its hash.
    """
    return Provenance(
        # The first word of argv is "megatron-chameleon COMMAND".
        command=[*Path(sys.argv[0]).name.split(), *map(without_credentials, sys.argv[1:])],
        options=recorded_options(options),
        inputs={without_credentials(name): digest for name, digest in inputs.items()},
        versions={"python": platform.python_version(), **package_versions(PACKAGES)},
        git_commit=git_commit(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        working_folder=os.path.abspath("."),
    )


@contextlib.contextmanager
def in_folder(folder: str | None) -> Iterator[None]:
    """Resolve relative paths in the block as in a command that ran in ``folder``, if it exists."""
    with contextlib.chdir(folder) if folder and os.path.isdir(folder) else contextlib.nullcontext():
        yield


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Version of each package, or "not installed"."""
    return {package: _version(package) for package in packages}


@functools.cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def machine_info() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in GB, and operating system."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": platform.platform(),
    }


@functools.cache
def git_commit() -> str | None:
    """Commit of the source tree, with "+changes" if it is modified; None outside a git checkout.

    The source tree may change later, but the process has imported this commit.
    """
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None  # git is not installed; the versions of the packages are recorded instead
    return done.stdout.strip() or None


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of a stage. Costs of stages can be added.

    Attributes:
        flops: floating-point operations, counted from the model's shapes; 0 without a model.
        device_seconds: wall seconds times the number of devices.
        wall_seconds: elapsed seconds, without the start-up of the process.
        num_devices: devices (GPUs, or CPU ranks).
    """

    flops: float = 0.0
    device_seconds: Amount = 0.0
    wall_seconds: Amount = 0.0
    num_devices: Count = 1

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            flops=self.flops + other.flops,
            device_seconds=self.device_seconds + other.device_seconds,
            wall_seconds=self.wall_seconds + other.wall_seconds,
            num_devices=max(self.num_devices, other.num_devices),
        )


class Stopwatch:
    """Measures the cost since its construction."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Elapsed seconds."""
        return time.perf_counter() - self._start

    def cost(self, flops: float = 0.0, num_devices: int = 1) -> Cost:
        """Cost of ``flops`` operations on ``num_devices`` devices in the elapsed time."""
        seconds = self.seconds()
        return Cost(flops, seconds * num_devices, seconds, num_devices)
