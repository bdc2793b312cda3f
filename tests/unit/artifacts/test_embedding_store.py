from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_chameleon.artifacts import Cost, EmbeddingStore
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.errors import UserError
from tests.full_disk import largest_file_size
from tests.unit.artifacts.artifact_samples import COST, PROVENANCE, RECIPE


@pytest.fixture
def empty(tmp_path):
    return EmbeddingStore(tmp_path / "store", RECIPE, 4, {}, PROVENANCE, Cost())


@pytest.fixture
def store(empty):
    return empty.write_domain("a", vectors_of(0), 100, "hash of a", COST)


def vectors_of(seed: int, windows: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(windows, 4)).astype(np.float32)


def test_vectors_round_trip_for_any_domain_name(empty):
    assert not EmbeddingStore.exists(empty.root)
    store, names = empty, ["a", "a b", "a_b", "../escape", "", "ü" * 40]
    for seed, name in enumerate(names):
        store = store.write_domain(name, vectors_of(seed, windows=seed), 100, f"hash {seed}", COST)
    read = EmbeddingStore.load(store.root)
    assert read == store
    assert read.cost.flops == pytest.approx(len(names) * COST.flops)
    for seed, name in enumerate(names):
        np.testing.assert_array_equal(read.vectors(name), vectors_of(seed, windows=seed))
    assert len(list(store.root.iterdir())) == len(names) + 1


def test_store_holds_a_domain_for_its_text_only(store):
    assert store.holds("a", "hash of a")
    assert not store.holds("b", "hash of a")
    replaced = store.write_domain("a", vectors_of(1, windows=5), 100, "new", COST)
    assert replaced.holds("a", "new")
    assert not replaced.holds("a", "hash of a")
    assert np.array_equal(replaced.vectors("a"), vectors_of(1, windows=5))
    (store.root / replaced.domains["a"].file).unlink()
    assert not replaced.holds("a", "new")


def test_store_of_another_recipe_is_unchanged(store):
    recipe = dataclasses.replace(RECIPE, layer=9)
    with pytest.raises(UserError, match="layer 2, not 9"):
        dataclasses.replace(store, recipe=recipe).write_domain("b", vectors_of(1), 100, "h", COST)
    assert EmbeddingStore.load(store.root) == store


def test_file_of_other_tensors_is_rejected(store):
    path, vectors = store.root / store.domains["a"].file, vectors_of(0)
    for tensors in (
        {"weights": vectors},
        {"vectors": vectors[:, :2]},
        {"vectors": vectors * np.float32(np.nan)},
    ):
        save_file(tensors, path)
        entry = dataclasses.replace(store.domains["a"], sha256=sha256_of_files(path))
        with pytest.raises(UserError, match=r"a\.safetensors"):
            dataclasses.replace(store, domains={"a": entry}).vectors("a")


def test_any_flipped_bit_is_found(store):
    path = store.root / store.domains["a"].file
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 31):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(UserError, match=r"SHA-256 .*delete it"):
            store.vectors("a")


def test_file_outside_the_store_is_rejected(store):
    for name in ("../x", "/etc/passwd", "a/../../x", "", ".", "a\0b", "x" * 300):
        entry = dataclasses.replace(store.domains["a"], file=name)
        dataclasses.replace(store, domains={"a": entry}).save()
        with pytest.raises(UserError, match=r"store\.json: field domains\.a\.file"):
            EmbeddingStore.load(store.root)


def test_full_disk_leaves_the_store_unchanged(store):
    before = {path.name: path.read_bytes() for path in store.root.iterdir()}
    with largest_file_size(10_000), pytest.raises(UserError, match="cannot write"):
        store.write_domain("b", vectors_of(1, windows=10_000), 100, "h", COST)
    assert {path.name: path.read_bytes() for path in store.root.iterdir()} == before


def test_two_processes_can_fill_a_store_concurrently(empty):
    child = os.fork()
    try:
        store = empty
        for seed in range(25):
            name = f"{child == 0} {seed}"
            store = store.write_domain(name, vectors_of(seed), 100, f"hash of {name}", COST)
    finally:
        if child == 0:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    read = EmbeddingStore.load(empty.root)
    assert len(read.domains) == 50
    assert read.cost.flops == pytest.approx(50 * COST.flops)
    for name, entry in read.domains.items():
        assert entry.corpus_hash == f"hash of {name}"
        assert np.array_equal(read.vectors(name), vectors_of(int(name.split()[1])))
