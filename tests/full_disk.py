"""A disk that is full, as a process sees it: files cannot grow."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def largest_file_size(size: int) -> Iterator[None]:
    """A block in which this process, and those it starts, can write no file beyond ``size`` bytes.

    The system then refuses as it does where the disk is full, by another number (EFBIG).
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
