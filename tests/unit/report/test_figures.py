"""Figures show the numbers of the artifacts for any number of domains, runs and windows."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from sklearn.decomposition import PCA

from megatron_chameleon.artifacts import Cost, EmbeddingRecipe, EmbeddingStore, Mixture
from megatron_chameleon.artifacts.training_run import METRICS_NAME
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.figures import (
    affinity_picture,
    loss_figure,
    pca_points,
    run_curves,
    umap_points,
    weights_picture,
    window_map,
)
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.artifacts.artifact_samples import write_metrics
from tests.unit.report.samples import (
    NAMES,
    PROVENANCE,
    random_mixture,
    write_losses,
    write_training_run,
)

ODD_NAMES = ["$x_1$ and {y", "_hidden", "a|b_<x>", "n" * 90, "line\nbreak", "plain"]


def picture_of(picture, *mixtures):
    found = picture({f"${i}$": mixture for i, mixture in enumerate(mixtures)})
    assert found is not None
    return found.figure


def make_run(tmp_path, name="run", names=NAMES, seed=0):
    run = write_training_run(tmp_path / name, Mixture.uniform(names).weights, "uniform")
    write_losses(run.root, names, [2.0 + i for i in range(len(names))], seed)
    return run


def test_whiskers_are_the_intervals_even_if_the_weight_is_outside(rng):
    mixture = random_mixture(NAMES, rng)
    intervals = {name: (1.1 * w, 1.3 * w) for name, w in mixture.weights.items() if name != "code"}
    figure = picture_of(weights_picture, dataclasses.replace(mixture, intervals=intervals))
    (whiskers,) = cast(list[LineCollection], figure.axes[0].collections)
    order = [n for n in sorted(NAMES, key=lambda n: -mixture.weights[n]) if n in intervals]
    ends = np.array([segment[:, 0] for segment in whiskers.get_segments()])
    np.testing.assert_allclose(ends, [intervals[name] for name in order])


@pytest.mark.parametrize("count", [6, 150])
def test_the_heat_map_holds_the_affinity(rng, count):
    names = [f"domain {i}" for i in range(count)]
    mixture = random_mixture(names, rng)
    axes = picture_of(affinity_picture, mixture).axes[0]
    (image,) = axes.images
    np.testing.assert_array_equal(np.asarray(image.get_array()), mixture.affinity)
    low, high = image.get_clim()
    assert low == -high < 0
    assert len(axes.texts) == (count**2 if count <= 12 else 0)
    shown = [tick.get_text() for tick in axes.get_yticklabels()]
    assert shown == names[:: 1 if count <= 60 else 3]


def test_curves_are_the_recorded_losses(tmp_path):
    run = write_training_run(tmp_path, {"a": 1.0}, "uniform")
    records = [
        {"step": 10, "loss": 4.0, "domain_loss": {"a": 4.5}},
        {"step": 20, "loss": 3.0, "domain_loss": {}},
        {"step": 20, "validation_loss": {"a": 3.5}},
        {"step": 30, "loss": 2.0, "domain_loss": {"a": 2.5, "b": None}},
    ]
    write_metrics(tmp_path / METRICS_NAME, records)
    curves = run_curves("x", run)
    assert curves.total.to_dict() == {10: 4.0, 20: 3.0, 30: 2.0}
    assert {name: curve.to_dict() for name, curve in curves.domains.items()} == {
        "a": {10: 4.5, 30: 2.5}
    }
    assert curves.validation["a"].to_dict() == {20: 3.5}


def test_the_loss_figure_has_a_panel_for_all_and_one_per_domain(tmp_path):
    runs = [run_curves(label, make_run(tmp_path, label, seed=i)) for i, label in enumerate("AB")]
    proxy = run_curves("proxy", make_run(tmp_path, "proxy", seed=9))
    figure = loss_figure(runs, [proxy])
    total, *panels = figure.axes
    assert [panel.get_title("left") for panel in panels] == NAMES
    thin = [line for line in total.lines if line.get_linewidth() < 1]
    assert len(thin) == 3
    for line, run in zip(thin, [*runs, proxy], strict=True):
        np.testing.assert_array_equal(line.get_ydata(), run.total)
    for panel, name in zip(panels, NAMES, strict=True):
        line = panel.lines[0]
        curve = runs[0].domains[name]
        np.testing.assert_array_equal(line.get_ydata(), curve[curve.index > 20])
        dots = [line for line in panel.lines if line.get_marker() == "o"]
        np.testing.assert_array_equal(dots[1].get_ydata(), runs[1].validation[name])
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["A", "B", "proxy", "held-out text"]


def test_names_are_shown_literally_and_shortened(tmp_path, rng):
    mixture = random_mixture(ODD_NAMES, rng)
    weights = picture_of(weights_picture, mixture, mixture)
    affinity = picture_of(affinity_picture, mixture)
    losses = loss_figure([run_curves("_$r$", make_run(tmp_path, names=ODD_NAMES))])
    shown = [label.get_text() for label in affinity.axes[0].get_yticklabels()]
    assert shown[:3] == ODD_NAMES[:3]
    assert len(shown[3]) < 30
    assert shown[4:] == ["line break", "plain"]
    assert [t.get_text() for t in weights.legends[0].get_texts()][:2] == ["$0$", "$1$"]
    assert losses.legends[0].get_texts()[0].get_text() == "_$r$"


RECIPE = EmbeddingRecipe("1", 1, 64, 16, 0, "0")
HIDDEN = 8


def folder_with(root, counts):
    """A run folder whose windows of each domain lie around a centre."""
    rng = np.random.default_rng(0)
    store = EmbeddingStore(root / "3-embeddings", RECIPE, HIDDEN, {}, PROVENANCE, Cost())
    for name, count in counts.items():
        vectors = rng.normal(size=HIDDEN) * 10 + rng.normal(size=(count, HIDDEN))
        store = store.write_domain(name, vectors.astype(np.float32), 100, "hash", Cost())
    store.save()
    return RunFolder.load(root)


def test_pca_matches_scikit_learn_up_to_signs(rng):
    vectors = (rng.normal(size=(500, HIDDEN)) * np.arange(HIDDEN) + 100).astype(np.float32)
    points, shares = pca_points(vectors)
    expected = PCA(2).fit(vectors.astype(np.float64))
    np.testing.assert_allclose(np.abs(points), np.abs(expected.transform(vectors)), atol=1e-3)
    np.testing.assert_allclose(shares, expected.explained_variance_ratio_, rtol=1e-5)


def test_windows_are_sampled_evenly_and_reproducibly_without_duplicates(root, monkeypatch):
    monkeypatch.setattr("megatron_chameleon.report.figures.MOST_WINDOWS", 50)
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
    folder.embeddings["3-embeddings"].write_domain("prose", vectors, 100, "hash", Cost()).save()
    with pytest.raises(UserError, match="NaN or infinite"):
        window_map(RunFolder.load(root))


@pytest.mark.slow
def test_umap_keeps_domains_together_and_is_seeded(root):
    pytest.importorskip("umap")
    folder = folder_with(root, {"code": 70, "news": 70, "prose": 70})
    found = window_map(folder)
    assert found is not None
    without = window_map(folder, "pca")
    assert without is not None
    assert "by PCA" in without.summary
    assert found.summary == (
        "210 windows of 3-embeddings by UMAP, 15 neighbours, seed 0; the axes have no meaning"
    )
    centres = found.centroids
    away = np.linalg.norm(found.points[:, None] - centres[None], axis=2)
    assert np.mean(away.argmin(axis=1) == found.domains) > 0.99
    vectors = np.concatenate([folder.embeddings["3-embeddings"].vectors(n) for n in found.names])
    np.testing.assert_array_equal(umap_points(vectors), found.points)
