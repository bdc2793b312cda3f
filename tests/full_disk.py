"""Simulate a full disk by limiting the size of files."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def largest_file_size(size: int) -> Iterator[None]:
    """Limit files to ``size`` bytes in this process and its children.

    Writing beyond this size fails with EFBIG; on a full disk, it would fail with ENOSPC.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
