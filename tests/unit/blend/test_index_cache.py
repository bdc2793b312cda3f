from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.blend.index_cache import STALE_AFTER_SECONDS, cached_arrays
from megatron_chameleon.blend.streams import index_key, megatron_view
from megatron_chameleon.blend.token_data import corpus_tokens
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


def test_cached_arrays_are_mapped_read_only(tmp_path):
    assert_same(cached_arrays(tmp_path / "cache", KEY, lambda: arrays_of(9)), arrays_of(9))
    again = cached_arrays(tmp_path / "cache", KEY, build_nothing)
    assert_same(again, arrays_of(9))
    assert not any(array.flags.writeable for array in again.values())
    assert all(array.flags.aligned for array in again.values())


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
def test_a_damaged_entry_is_rebuilt(tmp_path, damage):
    cached_arrays(tmp_path, KEY, lambda: arrays_of(9))
    (entry,) = tmp_path.iterdir()
    damage(entry)
    with pytest.warns(UserWarning, match=r"is damaged .* and is rebuilt"):
        assert_same(cached_arrays(tmp_path, KEY, lambda: arrays_of(9)), arrays_of(9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(cached_arrays(tmp_path, KEY, build_nothing), arrays_of(9))
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing beyond ``size`` bytes fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    with (
        file_size_limit(10_000),
        pytest.raises(UserError, match=r"cannot write .* free space or choose another folder"),
    ):
        cached_arrays(tmp_path, KEY, lambda: arrays_of(5000))
    assert list(tmp_path.iterdir()) == []
    assert_same(cached_arrays(tmp_path, KEY, lambda: arrays_of(5000)), arrays_of(5000))


@pytest.fixture
def folder_of_another() -> Iterator[Path]:
    """A folder outside of root's own, and this process as a user who may not do everything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if os.geteuid() != 0:
            yield folder
            folder.chmod(0o755)
            return
        shutil.chown(folder, 65534)
        os.seteuid(65534)
        yield folder
        os.seteuid(0)


def test_a_read_only_folder_can_be_read(folder_of_another):
    cached_arrays(folder_of_another, KEY, lambda: arrays_of(9))
    folder_of_another.chmod(0o555)
    assert_same(cached_arrays(folder_of_another, KEY, build_nothing), arrays_of(9))
    with pytest.raises(UserError, match=r"cannot write .* choose another folder"):
        cached_arrays(folder_of_another, {**KEY, "seed": 2}, lambda: arrays_of(9))
    (entry,) = folder_of_another.iterdir()
    flip(entry / "shuffle.npy")
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(UserError, match=r"cannot write .* choose another folder"),
    ):
        cached_arrays(folder_of_another, KEY, build_nothing)


def killed_while_writing(folder):
    def die(*_arguments, **_more):
        os.kill(os.getpid(), signal.SIGKILL)

    np.save = die
    cached_arrays(folder, KEY, lambda: arrays_of(9))


def age(folder, seconds):
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - seconds,) * 2)


def test_leftovers_of_killed_processes_are_removed_after_a_day(tmp_path):
    process = multiprocessing.get_context("fork").Process(
        target=killed_while_writing, args=(tmp_path,)
    )
    process.start()
    process.join()
    (left,) = tmp_path.iterdir()
    damaged, foreign = tmp_path / ".damaged.x7", tmp_path / ".mine"
    for folder in (damaged, foreign):
        (folder / "inside").mkdir(parents=True)
        age(folder, STALE_AFTER_SECONDS + 60)

    cached_arrays(tmp_path, KEY, lambda: arrays_of(9))
    # The first may still be in use, and the last has another name.
    assert left.is_dir()
    assert not damaged.exists()
    assert foreign.is_dir()

    age(left, STALE_AFTER_SECONDS + 60)
    (left / "shuffle.npy").touch()  # something is being written to it
    cached_arrays(tmp_path, {**KEY, "seed": 2}, lambda: arrays_of(9))
    assert left.is_dir()

    age(left, STALE_AFTER_SECONDS + 60)
    cached_arrays(tmp_path, {**KEY, "seed": 3}, lambda: arrays_of(9))
    assert not left.exists()


@pytest.fixture
def domain(make_corpus):
    """Two sequences after two others that are as long."""
    data = corpus_tokens(make_corpus({"a": [9, 9, 9, 9]}))
    return data.domains[0]


def test_keys_contain_everything_that_determines_the_indices(domain):
    lengths = domain.open().lengths
    halves = [
        dataclasses.replace(domain, first=first, stop=first + 2, tokens=18) for first in (0, 2)
    ]
    other = lengths.copy()
    other[0] = 8
    keys = [
        index_key(halves[0], lengths, 5, 4, 1),
        index_key(halves[1], lengths, 5, 4, 1),
        index_key(halves[0], other, 5, 4, 1),
        index_key(halves[0], lengths, 6, 4, 1),
        index_key(halves[0], lengths, 5, 3, 1),
        index_key(halves[0], lengths, 5, 4, 2),
    ]
    assert len({tuple(key.values()) for key in keys}) == len(keys)
    assert all("version" in key for key in keys)


def test_seeds_and_ranges_have_their_own_entries(domain, tmp_path):
    for first in (0, 2):
        part = dataclasses.replace(domain, first=first, stop=first + 2, tokens=18)
        for seed in (1, 2, 3):
            arguments = (part, part.open(), 20, 4, seed)
            expected = megatron_view(*arguments)
            for _ in range(2):  # built, then read
                found = megatron_view(*arguments, cache=tmp_path)
                np.testing.assert_array_equal(found.documents, expected.documents)
                np.testing.assert_array_equal(found.shuffle, expected.shuffle)
    assert len(list(tmp_path.iterdir())) == 6 + 1  # and the corpus


def build_beside_others(folder, start, results):
    def slowly():
        time.sleep(0.2)  # so that all of them build
        return arrays_of(50)

    start.wait()
    found = cached_arrays(folder, KEY, slowly)
    results.put(all(np.array_equal(found[k], v) for k, v in arrays_of(50).items()))


def test_concurrent_builders_of_an_entry_do_not_collide(tmp_path):
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
