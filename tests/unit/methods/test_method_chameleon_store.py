"""Chameleon's embeddings on disk: what is used again, and what is not."""

from __future__ import annotations

import pytest

from megatron_chameleon.artifacts import (
    EmbeddingStore,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.mixture import ExtractionOptions
from tests.small_corpus import DOMAINS, write_small_corpus
from tests.unit.methods.chameleon_runs import (
    WINDOWS,
    compute,
    options,
    store_beside,
)

__all__ = ["compute", "options"]  # fixtures


def test_the_second_run_embeds_nothing_and_finds_the_same(compute, options, capsys):
    first = compute()
    assert ", 0 domains reused from " in capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in store_beside(options).root.iterdir()}
    second = compute()
    printed = capsys.readouterr().out
    assert ", 3 domains reused from " in printed
    assert "embedding 0 domains took 0.00e+00 FLOPs" in printed
    assert {p: p.stat().st_mtime_ns for p in store_beside(options).root.iterdir()} == files
    assert second.weights == first.weights
    assert second.intervals == first.intervals


def test_a_new_domain_is_embedded_alone_and_the_old_ones_stay(compute, options, tmp_path, capsys):
    two = write_small_corpus(tmp_path / "two", ("a", "b"))
    three = write_small_corpus(tmp_path / "three", ("a", "b", "c"))
    compute(corpus=two.root)
    store = store_beside(options)
    old = {name: (store.root / store.domains[name].file).read_bytes() for name in "ab"}
    capsys.readouterr()
    mixture = compute(corpus=three.root)
    printed = capsys.readouterr().out
    assert ", 2 domains reused from " in printed
    assert "embedding 1 domains took" in printed
    assert list(mixture.weights) == ["a", "b", "c"]
    for name, content in old.items():
        assert (store.root / store.domains[name].file).read_bytes() == content


def test_a_store_may_lie_elsewhere(compute, tmp_path):
    compute(store=tmp_path / "elsewhere")
    assert set(EmbeddingStore.load(tmp_path / "elsewhere").domains) == set(DOMAINS)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mixture.json"]


def test_a_store_of_another_layer_is_refused(compute, options):
    compute()
    with pytest.raises(UserError, match=r"another layer \(2, now 3\); pass another --store"):
        compute(extraction=ExtractionOptions(layer=3, num_windows=WINDOWS))


def test_layer_windows_and_seed_change_the_embeddings(compute, tmp_path):
    weights = set()
    for number, extraction in enumerate(
        [
            ExtractionOptions(num_windows=WINDOWS),
            ExtractionOptions(num_windows=WINDOWS, layer=3),
            ExtractionOptions(num_windows=WINDOWS, window_length=16),
            ExtractionOptions(num_windows=WINDOWS, extraction_seed=1),
            ExtractionOptions(num_windows=30),
        ]
    ):
        mixture = compute(extraction=extraction, store=tmp_path / str(number))
        weights.add(tuple(mixture.weights.values()))
    assert len(weights) == 5


def test_the_batch_size_changes_nothing_to_speak_of(compute, tmp_path):
    by_size = [
        compute(
            extraction=ExtractionOptions(num_windows=WINDOWS, embedding_batch_size=size),
            store=tmp_path / str(size),
        )
        for size in (1, 1000)
    ]
    assert by_size[0].weights == pytest.approx(by_size[1].weights, rel=1e-4)
