"""Reading a file as an array that lies on disk, without keeping the file open.

Python's mmap, and numpy's memmap over it, hold a file descriptor for as long as the map is there;
with two files a domain and split, a thousand domains meet the limit of open files (often 1024).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import stat
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# Read rather than mapped; twice this for each domain is little beside what a map costs.
_SMALL_BYTES = 1 << 14
_MAP_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file, [size] uint8, read-only; pages are read when they are looked at.

    The map lives as long as the array or any view of it, and no descriptor does. The system
    limits how many maps a process has (Linux: vm.max_map_count, 65,530 by default), so small files,
    such as those of tens of thousands of domains, are read into memory. A file that is cut short
    while it is mapped ends the process when the lost part is read: replace files, do not rewrite
    them.

    Raises:
        OSError: if there is no such file, it is no regular file, or it cannot be read or mapped.
    """
    # Without O_NONBLOCK, opening a named pipe waits for somebody to write to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        if status.st_size <= _SMALL_BYTES:
            with open(descriptor, "rb", closefd=False) as stream:
                return np.frombuffer(stream.read(), np.uint8)
        return _map(descriptor, status.st_size, path)
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int, path: Path) -> NDArray[np.uint8]:
    library = _c_library()
    address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"Cannot map {size} bytes: {os.strerror(number)}", str(path))
    memory = (ctypes.c_char * size).from_address(address)
    # At exit the system takes the map back by itself, and other threads may still be reading.
    weakref.finalize(memory, library.munmap, address, size).atexit = False
    # The pages refuse to be written, so the array must too: nobody can make it writeable again.
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8)


@functools.cache
def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
