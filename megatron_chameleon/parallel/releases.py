"""Releases of megatron-core: whether the installed one can be used, and what differs between them.

setup.py has the range of supported releases. All other modules call only what every release in the
range has.
"""

from __future__ import annotations

import dataclasses
import inspect
import platform
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

from megatron_chameleon.errors import UserError

_PACKAGE = "megatron-core"


def release_problem() -> str | None:
    """Check the installed megatron-core against this package and Python. Loads no torch.

    pip refuses such an installation, but not one with --no-deps, of a container or of a checkout.

    Returns:
        None if the release can be used, otherwise one line with the cause and the fix.
    """
    try:
        installed = metadata.metadata(_PACKAGE)
        from packaging.requirements import Requirement
        from packaging.specifiers import SpecifierSet
    except ImportError:  # not installed, or a folder in PYTHONPATH, which has no metadata
        return None
    version, python = installed["Version"], platform.python_version()
    needed = str(installed.json.get("requires_python", ""))
    supported = _own_requirement(Requirement)
    if supported is not None and not supported.contains(version, prereleases=True):
        return (
            f"megatron-core {version} is installed, but this release of megatron-chameleon "
            f"supports {supported}: pip install 'megatron-core{supported}'"
        )
    if not SpecifierSet(needed).contains(python, prereleases=True):
        return (
            f"megatron-core {version} needs Python {needed}, but this is Python {python}: use "
            f"another Python, or pip install --force-reinstall 'megatron-core{supported or ''}'"
        )
    return None


def import_problem(error: ImportError) -> str | None:
    """Explain a failed import by the installed megatron-core; None if it is not the cause.

    From 0.18 on, megatron-core imports Triton without declaring it.
    """
    if (error.name or "").partition(".")[0] == "triton":
        return (
            "megatron-core needs Triton, which builds of torch for the CPU do not bring: "
            "pip install triton"
        )
    return release_problem()


def require_fields(config: type, fields: Iterable[str], flag: str, since: str) -> None:
    """Check that megatron's ``config``, a dataclass, has ``fields``.

    Raises:
        UserError: if it does not; the message names ``flag``, and the release ``since`` which it
            does.
    """
    if not set(fields) <= {field.name for field in dataclasses.fields(config)}:
        raise UserError(
            f"{flag} needs megatron-core {since} or newer, but {metadata.version(_PACKAGE)} is "
            "installed: use Python 3.12 or newer, and pip install --upgrade megatron-core"
        )


def saving_arguments(async_save: Callable[..., Any]) -> dict[str, str]:
    """Return the arguments with which megatron's ``async_save`` uses its own writer of files.

    Releases from 0.17 on need nvidia-resiliency-ext otherwise; 0.16 has no such argument. This
    function goes with the support of 0.16.
    """
    own_writer = {"async_strategy": "mcore"}
    return (
        own_writer if own_writer.keys() <= inspect.signature(async_save).parameters.keys() else {}
    )


def _own_requirement(parse: Callable[[str], Any]) -> Any:
    """Return the versions of megatron-core in the metadata of this package, from setup.py."""
    try:
        requirements = map(parse, metadata.requires("megatron-chameleon") or ())
        return next((r.specifier for r in requirements if r.name == _PACKAGE), None)
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return None
