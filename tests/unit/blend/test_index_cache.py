from __future__ import annotations

import multiprocessing
import os
import time
import warnings

import numpy as np
import pytest

from megatron_chameleon.blend.index_cache import cached_arrays
from megatron_chameleon.errors import UserError

KEY = {"seed": 1, "lengths": "0" * 64}


def arrays_of(number):
    return {
        "windows": np.arange(number * 6, dtype=np.int32).reshape(-1, 2),
        "shuffle": np.arange(number, dtype=np.uint32)[::-1].copy(),
    }


def build_nothing():
    raise AssertionError("this should have come from the cache")


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_what_was_built_is_read_again_and_mapped(tmp_path):
    assert_same(cached_arrays(tmp_path / "cache", KEY, lambda: arrays_of(9)), arrays_of(9))
    again = cached_arrays(tmp_path / "cache", KEY, build_nothing)
    assert_same(again, arrays_of(9))
    assert not any(array.flags.writeable for array in again.values())
    assert all(array.flags.aligned for array in again.values())


def test_another_key_is_another_entry(tmp_path):
    cached_arrays(tmp_path, KEY, lambda: arrays_of(9))
    other = cached_arrays(tmp_path, {**KEY, "seed": 2}, lambda: arrays_of(5))
    assert_same(other, arrays_of(5))
    assert_same(cached_arrays(tmp_path, KEY, build_nothing), arrays_of(9))


def test_without_a_folder_nothing_is_kept():
    assert_same(cached_arrays(None, KEY, lambda: arrays_of(3)), arrays_of(3))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a byte changed": lambda entry: flip(entry / "shuffle.npy"),
    "cut short": lambda entry: os.truncate(entry / "windows.npy", 20),
    "an array missing": lambda entry: (entry / "windows.npy").unlink(),
    "no description": lambda entry: (entry / "index.json").unlink(),
    "a description that is none": lambda entry: (entry / "index.json").write_text("[]"),
    "a description of another key": lambda entry: (entry / "index.json").write_text(
        '{"key": {}, "sha256": {}}'
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_is_built_again(tmp_path, damage):
    cached_arrays(tmp_path, KEY, lambda: arrays_of(9))
    (entry,) = tmp_path.iterdir()
    damage(entry)
    with pytest.warns(UserWarning, match=r"is damaged .* and is built again"):
        assert_same(cached_arrays(tmp_path, KEY, lambda: arrays_of(9)), arrays_of(9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(cached_arrays(tmp_path, KEY, build_nothing), arrays_of(9))
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(AssertionError):
        cached_arrays(tmp_path, KEY, build_nothing)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"cannot write .* choose another folder"):
        cached_arrays(tmp_path / "file" / "cache", KEY, lambda: arrays_of(9))


def build_beside_others(folder, start, results):
    def slowly():
        time.sleep(0.2)  # so that all of them build
        return arrays_of(50)

    start.wait()
    found = cached_arrays(folder, KEY, slowly)
    results.put(all(np.array_equal(found[k], v) for k, v in arrays_of(50).items()))


def test_processes_that_build_the_same_entry_do_each_other_no_harm(tmp_path):
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    builders = [
        context.Process(target=build_beside_others, args=(tmp_path, start, results))
        for _ in range(4)
    ]
    for builder in builders:
        builder.start()
    start.set()
    assert [results.get(timeout=60) for _ in builders] == [True] * 4
    for builder in builders:
        builder.join()
        assert builder.exitcode == 0
    assert len(list(tmp_path.iterdir())) == 1
    assert_same(cached_arrays(tmp_path, KEY, build_nothing), arrays_of(50))
