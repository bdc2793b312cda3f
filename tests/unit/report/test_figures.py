"""Figures show the numbers of the artifacts, however many domains and runs there are."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import pytest
from matplotlib.collections import LineCollection

from megatron_chameleon.artifacts import Mixture, TrainingRun
from megatron_chameleon.artifacts.training_run import METRICS_NAME
from megatron_chameleon.report.figures import (
    PAGE_COLORS,
    affinity_picture,
    loss_figure,
    run_curves,
    svg_content,
    weights_picture,
)
from tests.unit.artifacts.artifact_samples import write_metrics
from tests.unit.report.samples import (
    NAMES,
    random_mixture,
    random_weights,
    write_losses,
    write_training_run,
)

ODD_NAMES = ["$x_1$ and {y", "_hidden", "a|b_<x>", "n" * 90, "line\nbreak", "plain"]


def picture_of(picture, *mixtures):
    found = picture({f"${i}$": mixture for i, mixture in enumerate(mixtures)})
    assert found is not None
    return found.figure


def make_run(tmp_path, name="run", names=NAMES, seed=0) -> TrainingRun:
    run = write_training_run(tmp_path / name, Mixture.uniform(names).weights, "uniform")
    write_losses(run.root, names, [2.0 + i for i in range(len(names))], seed)
    return run


def test_whiskers_are_the_intervals_even_if_the_weight_is_outside(rng):
    mixture = random_mixture(random_weights(NAMES, rng), "pretrain", rng.normal(size=(3, 4)))
    intervals = {name: (1.1 * w, 1.3 * w) for name, w in mixture.weights.items() if name != "code"}
    figure = picture_of(weights_picture, dataclasses.replace(mixture, intervals=intervals))
    (whiskers,) = cast(list[LineCollection], figure.axes[0].collections)
    order = [n for n in sorted(NAMES, key=lambda n: -mixture.weights[n]) if n in intervals]
    ends = np.array([segment[:, 0] for segment in whiskers.get_segments()])
    np.testing.assert_allclose(ends, [intervals[name] for name in order])


@pytest.mark.parametrize("count", [6, 150])
def test_the_heat_map_holds_the_affinity(rng, count):
    names = [f"domain {i}" for i in range(count)]
    mixture = random_mixture(random_weights(names, rng), "pretrain", rng.normal(size=(count, 8)))
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


def test_names_are_shown_as_they_are_and_cut_where_long(tmp_path, rng):
    features = rng.normal(size=(len(ODD_NAMES), 4))
    mixture = random_mixture(random_weights(ODD_NAMES, rng), "pretrain", features)
    weights = picture_of(weights_picture, mixture, mixture)
    affinity = picture_of(affinity_picture, mixture)
    losses = loss_figure([run_curves("_$r$", make_run(tmp_path, names=ODD_NAMES))])
    shown = [label.get_text() for label in affinity.axes[0].get_yticklabels()]
    assert shown[:3] == ODD_NAMES[:3]
    assert len(shown[3]) < 30
    assert shown[4:] == ["line break", "plain"]
    assert [t.get_text() for t in weights.legends[0].get_texts()][:2] == ["$0$", "$1$"]
    assert losses.legends[0].get_texts()[0].get_text() == "_$r$"


def test_colours_are_variables_of_the_page(rng):
    mixture = random_mixture(random_weights(NAMES, rng), "pretrain", rng.normal(size=(3, 4)))
    page = svg_content(picture_of(weights_picture, mixture), "w")
    for name in ("--paper", "--grid", "--reference", "--series-0"):
        assert f"var({name})" in page
    for color in PAGE_COLORS:
        assert color not in page.lower()
