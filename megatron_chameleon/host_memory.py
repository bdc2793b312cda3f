"""How much memory the host has, and a check before more than that is taken."""

from __future__ import annotations

from pathlib import Path

import psutil

from megatron_chameleon.errors import UserError

GB = 1e9
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def require_host_memory(needed: float, what: str, hint: str) -> None:
    """Check that the machine, or the container, is large enough; whether it is free, is not asked.

    Linux promises memory that it does not have, and kills the process that uses it.

    Args:
        needed: bytes.
        what: takes them, to begin a sentence.
        hint: how to need less.

    Raises:
        UserError: if it is not.
    """
    has = host_memory()
    if needed > has:
        raise UserError(
            f"{what} would take {needed / GB:,.0f} GB of memory, and this machine has "
            f"{has / GB:,.0f} GB; {hint}"
        )


def host_memory() -> int:
    """Bytes of memory and swap that this process could have at most."""
    limits = [psutil.virtual_memory().total + psutil.swap_memory().total]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such hierarchy, or "max"
            continue
    return min(limits)
