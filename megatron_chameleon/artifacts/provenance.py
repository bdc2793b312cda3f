"""How an artifact was made, so that it can be made again."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("megatron-chameleon", "torch", "megatron-core", "numpy", "scipy", "tokenizers")


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The command, options and software behind an artifact, and the hashes of what went in.

    Paths in the options are as they were given, from the working folder on.
    """

    command: list[str]
    options: dict[str, Any]
    inputs: dict[str, str]
    versions: dict[str, str]
    git_commit: str | None
    created: str
    working_folder: str | None = None


def provenance(options: Any, inputs: dict[str, str]) -> Provenance:
    """Provenance of what this process is making.

    Args:
        options: the tool's options, a frozen dataclass.
        inputs: name of each artifact read -> its hash.
    """
    return Provenance(
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
        options=plain_options(options),
        inputs=dict(inputs),
        versions={"python": platform.python_version(), **package_versions(PACKAGES)},
        git_commit=git_commit(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        working_folder=os.path.abspath("."),
    )


def plain_options(options: Any) -> dict[str, Any]:
    """The options dataclass as a dictionary that JSON can hold, nested groups included."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    body: dict[str, Any] = plain(dataclasses.asdict(options))
    return body


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """The version of each package, or that it is not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def git_commit() -> str | None:
    """The commit of the source tree, with '+changes' where it differs; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        changed = bool(commit) and bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git on this machine: the versions above still say what ran
    return f"{commit}{'+changes' if changed else ''}" if commit else None
