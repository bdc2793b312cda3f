"""The host's memory, and a check that an allocation fits."""

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
    """Check that the machine or container has enough memory in total, whether free or in use.

    Linux overcommits memory, and kills the process that uses too much of it.

    Args:
        needed: bytes.
        what: data or work that needs the memory; the subject of the message.
        hint: how to need less.

    Raises:
        UserError: if the machine has less memory.
    """
    has = host_memory()
    if needed > has:
        raise UserError(
            f"{what} would take {needed / GB:,.0f} GB of memory, and this machine has "
            f"{has / GB:,.0f} GB; {hint}"
        )


def host_memory() -> int:
    """Maximum bytes of memory and swap for this process."""
    limits = [psutil.virtual_memory().total + psutil.swap_memory().total]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            # The cgroup file does not exist, or sets no limit.
            continue
    return min(limits)
