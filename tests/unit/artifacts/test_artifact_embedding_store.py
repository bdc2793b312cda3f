from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import resource

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_chameleon.artifacts import Cost, EmbeddingStore
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import COST, PROVENANCE, RECIPE


@pytest.fixture
def empty(tmp_path):
    return EmbeddingStore(tmp_path / "store", RECIPE, 4, {}, PROVENANCE, Cost())


def vectors_of(seed: int, windows: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(windows, 4)).astype(np.float32)


def test_an_empty_store_is_not_on_disk_until_a_domain_is_added(empty):
    assert not EmbeddingStore.exists(empty.root)
    store = empty.with_domain("a", vectors_of(0), "hash of a", COST)
    assert EmbeddingStore.exists(store.root)
    assert EmbeddingStore.load(store.root) == store


def test_vectors_are_read_as_they_were_written(empty):
    store = empty
    names = ["a", "a b", "a_b", "../escape", "", "ü" * 40]
    for seed, name in enumerate(names):
        store = store.with_domain(name, vectors_of(seed, windows=seed), f"hash {seed}", COST)
    read = EmbeddingStore.load(store.root)
    for seed, name in enumerate(names):
        assert np.array_equal(read.vectors(name), vectors_of(seed, windows=seed))
        assert read.vectors(name).dtype == np.float32
        assert read.domains[name].windows == seed
    # One file per domain and the list of them, all in the store's folder.
    assert len(list(store.root.iterdir())) == len(names) + 1
    assert len(list(store.root.parent.iterdir())) == 1


def test_costs_of_domains_add_up(empty):
    store = empty.with_domain("a", vectors_of(0), "h", COST).with_domain(
        "b", vectors_of(1), "h", COST
    )
    assert store.cost == COST + COST == EmbeddingStore.load(store.root).cost


def test_a_domain_is_held_while_its_text_is_the_same_and_its_file_there(empty):
    store = empty.with_domain("a", vectors_of(0), "hash of a", COST)
    assert store.holds("a", "hash of a")
    assert not store.holds("a", "hash of other text")
    assert not store.holds("b", "hash of a")
    (store.root / store.domains["a"].file).unlink()
    assert not store.holds("a", "hash of a")


def test_a_domain_of_other_text_takes_the_place_of_the_old_one(empty):
    store = empty.with_domain("a", vectors_of(0), "old", COST).with_domain(
        "a", vectors_of(1, windows=5), "new", COST
    )
    assert store.holds("a", "new")
    assert not store.holds("a", "old")
    assert np.array_equal(store.vectors("a"), vectors_of(1, windows=5))


@pytest.mark.parametrize("damage", ["cut", "emptied", "noise", "gone"])
def test_a_damaged_file_is_named_with_the_way_out(empty, damage):
    store = empty.with_domain("a", vectors_of(0), "h", COST)
    path = store.root / store.domains["a"].file
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "emptied":
        os.truncate(path, 0)
    elif damage == "noise":
        path.write_bytes(os.urandom(200))
    else:
        path.unlink()
    with pytest.raises(
        UserError, match=r"cannot read .*a\.safetensors .*; delete it and run"
    ) as no:
        store.vectors("a")
    assert "\n" not in str(no.value)


def test_a_file_of_another_shape_is_refused(empty):
    store = empty.with_domain("a", vectors_of(0), "h", COST)
    wider = dataclasses.replace(store, hidden_size=8)
    with pytest.raises(UserError, match=r"\(3, 4\), store\.json says float32 of \(3, 8\)"):
        wider.vectors("a")


@pytest.mark.parametrize(
    "tensors",
    [
        {"weights": vectors_of(0)},
        {"vectors": vectors_of(0).astype(np.float64)},
        {"vectors": vectors_of(0).astype(np.float16)},
        {"vectors": np.full((3, 4), np.nan, np.float32)},
        {"vectors": np.full((3, 4), np.inf, np.float32)},
    ],
)
@pytest.mark.parametrize("has_checksum", [True, False])
def test_a_file_of_other_tensors_is_refused(empty, tensors, has_checksum):
    store = empty.with_domain("a", vectors_of(0), "h", COST)
    path = store.root / store.domains["a"].file
    save_file(tensors, path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest() if has_checksum else None
    entry = dataclasses.replace(store.domains["a"], sha256=sha256)
    with pytest.raises(UserError, match=r"a\.safetensors"):
        dataclasses.replace(store, domains={"a": entry}).vectors("a")


def test_every_flipped_bit_is_found(empty):
    store = empty.with_domain("a", vectors_of(0), "h", COST)
    path = store.root / store.domains["a"].file
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 7):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(UserError, match="SHA-256"):
            store.vectors("a")
    path.write_bytes(content)
    assert np.array_equal(store.vectors("a"), vectors_of(0))


def test_vectors_of_a_release_that_kept_no_checksum_are_made_again(empty):
    store = empty.with_domain("a", vectors_of(0), "hash of a", COST)
    path = store.root / "store.json"
    body = json.loads(path.read_text())
    del body["domains"]["a"]["sha256"], body["checksum"]
    path.write_text(json.dumps(body))
    old = EmbeddingStore.load(store.root)
    assert not old.holds("a", "hash of a")
    assert old.with_domain("a", vectors_of(0), "hash of a", COST).holds("a", "hash of a")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", ".", "a\0b", "x" * 300])
def test_a_file_outside_the_store_is_refused(empty, name):
    store = empty.with_domain("a", vectors_of(0), "h", COST)
    path = store.root / "store.json"
    body = json.loads(path.read_text())
    body["domains"]["a"]["file"] = name
    del body["checksum"]
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match=r"store\.json: field domains\.a\.file: "):
        EmbeddingStore.load(store.root)


def test_a_full_disk_leaves_the_store_as_it_was(empty):
    store = empty.with_domain("a", vectors_of(0), "h", COST)
    before = {path.name: path.read_bytes() for path in store.root.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file that may not grow fails as one on a full disk does: in the middle of a write.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot write"):
            store.with_domain("b", vectors_of(1, windows=10_000), "h", COST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in store.root.iterdir()} == before


def test_two_processes_that_fill_a_store_at_once_lose_nothing(empty):
    names = {"one": [f"one {i}" for i in range(25)], "other": [f"other {i}" for i in range(25)]}
    child = os.fork()
    mine = names["other" if child == 0 else "one"]
    try:
        store = empty
        for seed, name in enumerate(mine):
            store = store.with_domain(name, vectors_of(seed), f"hash of {name}", COST)
    finally:
        if child == 0:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    read = EmbeddingStore.load(empty.root)
    assert sorted(read.domains) == sorted([*names["one"], *names["other"]])
    assert read.cost.flops == pytest.approx(50 * COST.flops)
    for name, entry in read.domains.items():
        assert entry.corpus_hash == f"hash of {name}"
        assert np.array_equal(read.vectors(name), vectors_of(int(name.split()[1])))


def test_a_store_that_another_process_has_made_by_another_recipe_is_left_alone(empty):
    other = dataclasses.replace(empty, recipe=dataclasses.replace(RECIPE, seed=99))
    made = other.with_domain("a", vectors_of(0), "h", COST)
    with pytest.raises(UserError, match=r"has filled .*store by another recipe meanwhile"):
        empty.with_domain("a", vectors_of(1), "h", COST)
    assert EmbeddingStore.load(empty.root) == made
    assert np.array_equal(made.vectors("a"), vectors_of(0))
