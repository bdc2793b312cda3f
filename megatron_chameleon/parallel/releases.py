"""Releases of megatron-core: whether the installed one can be used, and what differs between them.

All other modules call only what every release in the range of SUPPORTED has.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

from megatron_chameleon.errors import UserError

_PACKAGE = "megatron-core"
SUPPORTED = ">=0.16,<0.20"
"""Supported releases, which setup.py reads from this line."""


def release_problem() -> str | None:
    """Check the installed megatron-core against this package and Python. Loads no torch.

    pip refuses such an installation, but not one with --no-deps, of a container or of a checkout.

    Returns:
        None if the release can be used, otherwise one line with the cause and the fix.
    """
    try:
        installed = metadata.metadata(_PACKAGE)
        from packaging.specifiers import SpecifierSet
    except ImportError:  # not installed, or a folder in PYTHONPATH, which has no metadata
        return None
    version, python = installed["Version"], platform.python_version()
    needed = str(installed.json.get("requires_python", ""))
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        return (
            f"megatron-core {version} is installed, but this release of megatron-chameleon "
            f"supports {SUPPORTED}: pip install 'megatron-core{SUPPORTED}'"
        )
    if not SpecifierSet(needed).contains(python, prereleases=True):
        return (
            f"megatron-core {version} needs Python {needed}, but this is Python {python}: use "
            f"another Python, or pip install --force-reinstall 'megatron-core{SUPPORTED}'"
        )
    return None


def import_problem(error: ImportError) -> str | None:
    """Explain a failed import by the installed megatron-core; None if it is not the cause.

    From 0.18 on, megatron-core imports Triton without declaring it.
    """
    package = (error.name or "").partition(".")[0]
    if package == "triton":
        return (
            "megatron-core needs Triton, which CPU builds of torch do not include: "
            "pip install triton"
        )
    return release_problem() if package == "megatron" else None


def require_release(
    flag: str,
    since: str,
    package: str = _PACKAGE,
    fix: str = "use Python 3.12 or newer, and pip install --upgrade megatron-core",
) -> None:
    """Check that ``package`` has what ``flag`` selects.

    Raises:
        UserError: if the package is older than ``since`` or missing; the message has ``fix``.
    """
    from packaging.version import Version

    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        installed = ""
    if not installed or Version(installed).release < Version(since).release:
        found = f"{installed} is installed" if installed else "it is not installed"
        raise UserError(f"{flag} needs {package} {since} or newer, but {found}: {fix}")


def saving_arguments(async_save: Callable[..., Any]) -> dict[str, str]:
    """Return the arguments with which megatron's ``async_save`` uses its own writer of files.

    Releases from 0.17 on need nvidia-resiliency-ext otherwise; 0.16 has no such argument. Remove
    this function when 0.16 is no longer supported.
    """
    has_choice = "async_strategy" in inspect.signature(async_save).parameters
    return {"async_strategy": "mcore"} if has_choice else {}
