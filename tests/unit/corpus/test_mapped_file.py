from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.corpus.indexed import map_file


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 16_384, 16_385, 100_000])
def test_a_map_is_the_bytes_of_the_file(tmp_path, size):
    content = np.random.default_rng(size).bytes(size)
    mapped = map_file(write(tmp_path / "a", content))
    assert mapped.dtype == np.uint8
    assert mapped.tobytes() == content
    with pytest.raises(ValueError, match="WRITEABLE"):
        mapped.setflags(write=True)


def test_no_file_stays_open_and_memory_is_given_back(tmp_path):
    paths = [write(tmp_path / f"{number}.bin", bytes([number]) * 20_000) for number in range(200)]
    before = len(os.listdir("/proc/self/fd"))
    maps = [map_file(path) for path in paths]
    assert len(os.listdir("/proc/self/fd")) == before
    assert [mapped[-1:].tolist() for mapped in maps] == [[number] for number in range(200)]
    view = maps[7].view(np.int8)[:1]  # the last that is left of a map
    del maps
    left = Path("/proc/self/maps").read_text()
    assert str(paths[7]) in left
    assert str(paths[8]) not in left
    assert view.tolist() == [7]
    del view
    assert str(paths[7]) not in Path("/proc/self/maps").read_text()


def test_files_of_tens_of_thousands_of_domains_need_few_maps(tmp_path):
    paths = [write(tmp_path / f"{number}.bin", bytes([number]) * 100) for number in range(200)]
    before = len(Path("/proc/self/maps").read_text().splitlines())
    maps = [map_file(path) for path in paths]
    assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 100
    assert [mapped[0] for mapped in maps] == list(range(200))


def test_a_map_for_which_there_is_no_room_is_refused(tmp_path):
    path, size = write(tmp_path / "a", b""), 1 << 32
    os.truncate(path, size)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + size // 2, before[1]))
        with pytest.raises(OSError, match="Cannot map 4294967296 bytes") as raised:
            map_file(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert raised.value.errno == errno.ENOMEM
    assert map_file(path).size == size
