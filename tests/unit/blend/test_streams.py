"""The cache of Megatron's indices: damage, faults, keys."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
import warnings

import numpy as np
import pytest

from megatron_chameleon.blend.streams import cached_arrays, megatron_view
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.errors import UserError
from tests.full_disk import largest_file_size

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
        assert found[name].flags.aligned
        assert not found[name].flags.writeable
        np.testing.assert_array_equal(found[name], array)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("number", [9, 10_000])  # small entries are read, large ones memory-mapped
@pytest.mark.parametrize(
    "damage", [flip, lambda entry: os.truncate(entry, 20), lambda entry: os.truncate(entry, 0)]
)
def test_a_damaged_entry_is_rebuilt(tmp_path, damage, number):
    folder = tmp_path / "cache"
    assert_same(cached_arrays(folder, KEY, lambda: arrays_of(number)), arrays_of(number))
    (entry,) = folder.iterdir()
    damage(entry)
    with pytest.warns(UserWarning, match=r"is damaged .* and is rebuilt"):
        assert_same(cached_arrays(folder, KEY, lambda: arrays_of(number)), arrays_of(number))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(cached_arrays(folder, KEY, build_nothing), arrays_of(number))
    assert list(folder.iterdir()) == [entry]


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    with (
        largest_file_size(10_000),
        pytest.raises(UserError, match=r"cannot write .* free space"),
    ):
        cached_arrays(tmp_path, KEY, lambda: arrays_of(5000))
    assert list(tmp_path.iterdir()) == []


def build_concurrently(folder, start, results):
    def slowly():
        time.sleep(0.2)  # so that no thread finds a finished entry
        return arrays_of(50)

    start.wait()
    found = cached_arrays(folder, KEY, slowly)
    results.put(all(np.array_equal(found[k], v) for k, v in arrays_of(50).items()))


def test_concurrent_builders_of_an_entry_do_not_collide(tmp_path):
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    arguments = tmp_path, start, results
    builders = [context.Process(target=build_concurrently, args=arguments) for _ in range(4)]
    for builder in builders:
        builder.start()
    start.set()
    assert [results.get(timeout=60) for _ in builders] == [True] * 4
    for builder in builders:
        builder.join()
    assert len(list(tmp_path.iterdir())) == 1


def test_everything_that_determines_the_indices_has_its_own_entry(make_corpus, tmp_path):
    (domain,) = open_domains(make_corpus({"a": [9, 9, 9, 9]})).domains
    (other,) = open_domains(make_corpus({"a": [8, 10, 9, 9]}, folder="other")).domains
    folder = tmp_path / "cache"
    cases = [
        (domain, 0, 20, 4, 1),
        (domain, 2, 20, 4, 1),
        (other, 0, 20, 4, 1),
        (domain, 0, 21, 4, 1),
        (domain, 0, 20, 3, 1),
        (domain, 0, 20, 4, 2),
    ]
    for found_in, first, num_samples, length, seed in cases:
        source = dataclasses.replace(found_in, first=first, stop=first + 2, tokens=18)
        expected = megatron_view(source, source.open(), num_samples, length, seed)
        for _ in range(2):  # the second call reads the cache
            found = megatron_view(source, source.open(), num_samples, length, seed, folder)
            assert np.array_equal(found.documents, expected.documents)
            samples = np.arange(found.num_samples)
            assert np.array_equal(found.find(samples), expected.find(samples))
    # The indices depend on the lengths of the sequences, not on their place in the file.
    assert len(list(folder.iterdir())) == len(cases) - 1
