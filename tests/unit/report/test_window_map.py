"""Windows in two dimensions: an even, seeded sample, PCA, UMAP, and the figure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from threadpoolctl import threadpool_info

from megatron_chameleon.artifacts import Cost, EmbeddingRecipe, EmbeddingStore
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.figures import MOST_NAMED, PROXY_COLOR
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.window_map import (
    WindowMap,
    named_domains,
    pca_points,
    umap_points,
    window_map,
    window_map_figure,
)
from tests.unit.report.samples import PROVENANCE

RECIPE = EmbeddingRecipe("1", 1, 64, 16, 0, "0")
HIDDEN = 8


def folder_with(root: Path, counts: dict[str, int]) -> RunFolder:
    """A run folder whose windows of each domain lie around a centre."""
    rng = np.random.default_rng(0)
    store = EmbeddingStore(root / "3-embeddings", RECIPE, HIDDEN, {}, PROVENANCE, Cost())
    for name, count in counts.items():
        vectors = rng.normal(size=HIDDEN) * 10 + rng.normal(size=(count, HIDDEN))
        store = store.with_domain(name, vectors.astype(np.float32), "hash", Cost())
    store.save()
    return RunFolder.load(root)


def test_pca_keeps_what_varies_most(rng):
    directions, _ = np.linalg.qr(rng.normal(size=(HIDDEN, HIDDEN)))
    scales = np.array([9.0, 4.0, *[0.1] * (HIDDEN - 2)])
    latent = rng.normal(size=(500, HIDDEN))
    vectors = (latent * scales) @ directions.T + 100
    points, (first, second) = pca_points(vectors.astype(np.float32))
    for axis in (0, 1):
        correlation = np.corrcoef(points[:, axis], latent[:, axis])[0, 1]
        assert abs(correlation) > 0.99
    variances = np.var(vectors @ directions, axis=0)
    np.testing.assert_allclose([first, second], variances[:2] / variances.sum(), rtol=0.02)
    # Distances in the plane are those of the vectors but for the small directions.
    apart = np.linalg.norm(vectors[:50] - vectors[50:100], axis=1)
    distances = np.linalg.norm(points[:50] - points[50:100], axis=1)
    np.testing.assert_allclose(distances, apart, atol=0.8)


def test_the_sample_is_even_seeded_and_without_repeats(root, monkeypatch):
    monkeypatch.setattr("megatron_chameleon.report.window_map.MOST_WINDOWS", 50)
    folder = folder_with(root, {"few": 5, "many": 200, "more": 400})
    first, second = window_map(folder), window_map(folder)
    assert first is not None
    assert second is not None
    assert np.bincount(first.domains).tolist() == [5, 16, 16]
    assert first.summary.startswith("37 of 605 windows")
    np.testing.assert_array_equal(first.points, second.points)
    assert len(np.unique(first.points, axis=0)) == 37


def test_embeddings_that_are_not_finite_are_reported(root):
    folder = folder_with(root, {"code": 12})
    vectors = np.full((12, HIDDEN), np.inf, dtype=np.float32)
    folder.embeddings["3-embeddings"].with_domain("prose", vectors, "hash", Cost()).save()
    with pytest.raises(UserError, match="NaN or infinite"):
        window_map(RunFolder.load(root))


@pytest.mark.slow
def test_umap_keeps_domains_together_and_is_seeded(root):
    pytest.importorskip("umap")
    folder = folder_with(root, {"code": 70, "news": 70, "prose": 70})
    found = window_map(folder)
    assert found is not None
    assert found.summary == (
        "210 windows of 3-embeddings by UMAP, 15 neighbours, seed 0; the axes have no meaning"
    )
    centres = found.centroids
    away = np.linalg.norm(found.points[:, None] - centres[None], axis=2)
    assert np.mean(away.argmin(axis=1) == found.domains) > 0.99
    vectors = np.concatenate([folder.embeddings["3-embeddings"].vectors(n) for n in found.names])
    np.testing.assert_array_equal(umap_points(vectors), found.points)


@pytest.mark.slow
def test_umap_leaves_the_threads_of_others_alone():
    """With other threads torch adds in another order, and a run repeats no more."""
    pytest.importorskip("umap")

    def threads() -> dict[str, int]:
        return {pool["filepath"]: pool["num_threads"] for pool in threadpool_info()}

    vectors = np.random.default_rng(0).normal(size=(30, HIDDEN)).astype(np.float32)
    umap_points(vectors)  # loads what it needs
    before = threads()
    assert torch.get_num_threads() == 1
    umap_points(vectors)
    assert threads() == before
    assert torch.get_num_threads() == 1


def test_of_a_thousand_domains_those_that_lie_apart_are_named():
    rng = np.random.default_rng(0)
    points = np.repeat(rng.uniform(-50, 50, size=(1000, 2)), 3, axis=0) + rng.normal(size=(3000, 2))
    names = tuple(f"domain {i}" for i in range(1000))
    domains = np.repeat(np.arange(1000), 3)
    shown = WindowMap(points.astype(np.float32), domains, names, "some windows")
    named = named_domains(shown)
    assert len(named) == len(set(named)) == MOST_NAMED
    centres = shown.centroids[named]
    apart = np.linalg.norm(centres[:, None] - centres[None], axis=2)[~np.eye(21, dtype=bool)]
    assert apart.min() > 10  # of about 22 in an even grid over 100 x 100; neighbours are at 2
    figure = window_map_figure(shown)
    (axes,) = figure.axes
    assert to_hex(axes.lines[0].get_color()) == PROXY_COLOR
    assert len(np.asarray(axes.lines[0].get_xydata())) == 3 * (1000 - MOST_NAMED)
    assert figure.legends[0].get_texts()[-1].get_text() == "979 other domains"
