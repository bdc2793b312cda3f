"""Figures: their data, legends and names, and which of many domains they show."""

from __future__ import annotations

import dataclasses
import io
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection
from matplotlib.container import BarContainer
from matplotlib.image import imread

from megatron_chameleon.artifacts import Mixture, TrainingRun
from megatron_chameleon.artifacts.training_run import METRICS_NAME, MetricsWarning
from megatron_chameleon.report.figures import (
    COLORS,
    RunCurves,
    affinity_figure,
    bar_domains,
    color_span,
    freeze_layout,
    loss_figure,
    loss_picture,
    outline,
    panel_domains,
    png,
    run_curves,
    smoothed,
    thinned,
    weights_figure,
    weights_picture,
)
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.artifacts.artifact_samples import write_metrics
from tests.unit.report.report_samples import (
    NAMES,
    random_mixture,
    random_weights,
    write_losses,
    write_training_run,
)

ODD_NAMES = ["$x_1$ and {y", "_hidden", "a|b_<x>", "n" * 90, "line\nbreak", "plain"]


@pytest.fixture
def mixtures(rng):
    features = rng.normal(size=(len(NAMES), 4))
    return {
        mode: random_mixture(random_weights(NAMES, rng), mode, features)
        for mode in ("pretraining", "fine-tuning")
    }


def make_run(tmp_path, name="run", names=NAMES, seed=0) -> TrainingRun:
    run = write_training_run(tmp_path / name, Mixture.uniform(names).weights, "uniform")
    write_losses(run.root, names, [2.0 + i for i in range(len(names))], seed)
    return run


def pixels(figure) -> np.ndarray:
    return imread(io.BytesIO(png(figure)))[..., :3]


def share_of(image: np.ndarray, color: str) -> float:
    """Share of the pixels that have ``color``."""
    wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return float(np.mean(np.all(np.abs(image - wanted) < 0.01, axis=-1)))


def test_bars_are_as_long_as_the_weights(mixtures):
    figure = weights_figure(mixtures)
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    order = sorted(NAMES, key=lambda name: -mixtures["pretraining"].weights[name])
    assert labels == order
    bars = [group for group in axes.containers if isinstance(group, BarContainer)]
    drawn = [[bar.get_width() for bar in group] for group in bars]
    assert drawn == [[mixture.weights[name] for name in order] for mixture in mixtures.values()]
    # The first mixture's bar lies above the second's, both around the name's tick.
    ticks = np.arange(len(NAMES))
    tops, bottoms = (np.array([bar.get_y() for bar in group]) for group in bars)
    assert np.all((ticks - 0.5 < tops) & (tops < bottoms) & (bottoms < ticks + 0.5))


def test_whiskers_are_the_intervals_even_if_the_weight_is_outside(mixtures):
    first = mixtures["pretraining"]
    intervals = {name: (1.1 * w, 1.3 * w) for name, w in first.weights.items() if name != "code"}
    figure = weights_figure({"one": dataclasses.replace(first, intervals=intervals)})
    (whiskers,) = cast(list[LineCollection], figure.axes[0].collections)
    order = [n for n in sorted(NAMES, key=lambda n: -first.weights[n]) if n in intervals]
    ends = np.array([segment[:, 0] for segment in whiskers.get_segments()])
    np.testing.assert_allclose(ends, [intervals[name] for name in order])


def test_a_line_stands_at_uniform(mixtures):
    (axes,) = weights_figure(mixtures).axes
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    np.testing.assert_array_equal([line.get_xdata() for line in dashed], [[1 / 3, 1 / 3]])


def test_the_legend_names_all_and_covers_no_data(mixtures):
    figure = weights_figure(mixtures)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["pretraining", "fine-tuning", "uniform (1/3)"]
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)


def test_a_long_legend_takes_no_room_from_the_curves():
    heights = []
    for count in (8, 60):
        curve = pd.Series(np.linspace(9, 3, 8), np.arange(1.0, 9.0))
        runs = [RunCurves(f"chameleon-pretrain-seed{i}", curve, {}, {}) for i in range(count)]
        figure = loss_figure(runs)
        figure.draw_without_rendering()
        heights.append(figure.axes[0].get_window_extent().height)
    assert heights[1] > 0.9 * heights[0]


@pytest.mark.parametrize("count", [2, 6, 20, 150])
def test_the_heat_map_holds_the_affinity(rng, count):
    features = rng.normal(size=(count, 8))
    affinity = features @ features.T
    names = [f"domain {i}" for i in range(count)]
    figure = affinity_figure(affinity, names)
    axes = figure.axes[0]
    (image,) = axes.images
    np.testing.assert_array_equal(np.asarray(image.get_array()), affinity)
    low, high = image.get_clim()
    assert low == -high < 0
    numbers = [text.get_text() for text in axes.texts]
    assert numbers == ([f"{v:.2f}" for v in affinity.flat] if count <= 12 else [])
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        shown = [tick.get_text() for tick in ticks]
        assert shown == names[:: 1 if count <= 60 else 3]


def test_the_heat_map_is_white_at_zero_and_coloured_by_sign():
    image = affinity_figure(np.array([[1.0, 0.0], [0.0, -1.0]]), ["a", "b"]).axes[0].images[0]
    values = np.array([0.0, 1.0, -1.0])
    at_zero, at_plus, at_minus = np.asarray(image.cmap(image.norm(values)))[:, :3]
    assert min(at_zero) > 0.93
    assert at_plus[0] > 3 * at_plus[2]
    assert at_minus[2] > 3 * at_minus[0]


def test_colours_span_what_lies_off_the_diagonal():
    assert color_span(np.array([[9.0, -2.0], [-2.0, 5.0]])) == 2.0
    assert color_span(np.array([[9.0, 0.01], [0.01, 5.0]])) == pytest.approx(0.9)
    assert color_span(np.zeros((3, 3))) == 1.0
    assert color_span(np.array([[4.0]])) == pytest.approx(0.4)


def test_curves_are_the_recorded_losses(tmp_path):
    run = write_training_run(tmp_path, {"a": 1.0}, "uniform")
    write_metrics(
        tmp_path / METRICS_NAME,
        [
            {"step": 10, "loss": 4.0, "domain_loss": {"a": 4.5}},
            {"step": 20, "loss": 3.0, "domain_loss": {}},
            {"step": 20, "validation_loss": {"a": 3.5}},
            {"step": 30, "loss": 2.0, "domain_loss": {"a": 2.5, "b": None}},
        ],
    )
    curves = run_curves("x", run)
    np.testing.assert_array_equal(curves.total.index, [10, 20, 30])
    np.testing.assert_array_equal(curves.total, [4.0, 3.0, 2.0])
    assert list(curves.domains) == ["a"]
    np.testing.assert_array_equal(curves.domains["a"].index, [10, 30])
    np.testing.assert_array_equal(curves.validation["a"], [3.5])


def test_a_damaged_record_is_left_out_of_the_curves(tmp_path):
    run = write_training_run(tmp_path, {"a": 1.0}, "uniform")
    records: list[dict[str, Any]] = [
        {"step": 0, "loss": 1.0},
        {"step": 1, "loss": "low"},
        {"step": 2, "loss": 0.5},
    ]
    write_metrics(tmp_path / METRICS_NAME, records)
    with pytest.warns(MetricsWarning):
        curves = run_curves("x", run)
    np.testing.assert_array_equal(curves.total.index, [0, 2])


def test_smoothing_is_a_centred_mean(rng):
    losses = rng.normal(size=103)
    found = smoothed(pd.Series(losses, np.arange(103.0)))
    expected = [losses[i : i + 4].sum() / 4 for i in range(100)]
    np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(found.index, np.arange(100) + 1.5)
    np.testing.assert_array_equal(smoothed(pd.Series(losses[:20])), losses[:20])


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
        drawn = panel.lines[0]
        curve = runs[0].domains[name]
        np.testing.assert_array_equal(drawn.get_ydata(), curve[curve.index > 20])
        dots = [line for line in panel.lines if line.get_marker() == "o"]
        np.testing.assert_array_equal(dots[1].get_ydata(), runs[1].validation[name])
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["A", "B", "proxy", "held-out text"]
    image = pixels(figure)
    assert share_of(image, COLORS[0]) > 1e-3
    assert share_of(image, COLORS[1]) > 1e-3


def test_runs_without_losses_per_domain_have_one_panel_with_units(tmp_path):
    run = make_run(tmp_path)
    write_metrics(run.root / METRICS_NAME, [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}])
    (axes,) = loss_figure([run_curves("A", run)]).axes
    assert axes.get_ylabel() == "loss (nats per token)"
    assert axes.get_xlabel() == "training step"
    assert "running mean" not in axes.get_title("left")


def test_names_are_shown_as_they_are_and_cut_where_long(tmp_path, rng):
    features = rng.normal(size=(len(ODD_NAMES), 4))
    mixture = random_mixture(random_weights(ODD_NAMES, rng), "pretrain", features)
    weights = weights_figure({"$a_$": mixture, "_b": mixture})
    affinity = affinity_figure(np.array(mixture.affinity), ODD_NAMES)
    losses = loss_figure([run_curves("_$r$", make_run(tmp_path, names=ODD_NAMES))])
    for figure in (weights, affinity, losses):
        png(figure)
    shown = [label.get_text() for label in affinity.axes[0].get_yticklabels()]
    assert shown[:3] == ODD_NAMES[:3]
    assert len(shown[3]) < 30
    assert shown[4:] == ["line break", "plain"]
    assert not any(label.get_parse_math() for label in affinity.axes[0].get_xticklabels())
    assert [t.get_text() for t in weights.legends[0].get_texts()][:2] == ["$a_$", "_b"]
    assert losses.legends[0].get_texts()[0].get_text() == "_$r$"


def test_many_runs_can_be_told_apart(tmp_path):
    curves = run_curves("x", make_run(tmp_path))
    runs = [dataclasses.replace(curves, label=f"run {i}") for i in range(12)]
    figure = loss_figure(runs)
    bold = [line for line in figure.axes[0].lines if line.get_linewidth() > 1]
    assert len({(line.get_color(), line.get_linestyle()) for line in bold}) == 12


@pytest.fixture
def curve(rng):
    return pd.Series(rng.normal(3.0, 0.5, 10_000), np.arange(1.0, 10_001.0))


def test_the_outline_keeps_every_peak_that_would_be_seen(curve):
    found = outline(curve, 200)
    assert 150 < len(found) <= 200
    assert found.index.is_monotonic_increasing
    pd.testing.assert_series_equal(found, curve[found.index])
    for part in np.split(curve.to_numpy(), 100):
        assert {part.min(), part.max()} <= set(found)


def test_thinning_keeps_both_ends(curve):
    fewer = thinned(curve, 50)
    assert len(fewer) == 50
    assert (fewer.index[0], fewer.index[-1]) == (1.0, 10_000.0)
    assert np.ptp(np.diff(fewer.index)) <= 1


@pytest.mark.parametrize("count", [0, 1, 50])
def test_a_curve_of_few_points_is_unchanged(count):
    curve = pd.Series(np.arange(float(count)))
    assert thinned(curve, 50) is curve
    assert outline(curve, 50) is curve


MANY = [f"domain {i:03d}" for i in range(300)]
TALLEST = 60  # inches


def curves(last, validation=None):
    """A run whose losses fall from 9 to ``last`` (name -> loss)."""
    steps = np.arange(1.0, 4.0)
    training, held_out = (
        {name: pd.Series([9.0, 8.0, loss], steps) for name, loss in found.items()}
        for found in (last, validation or {})
    )
    return RunCurves("run", pd.Series(steps, steps), training, held_out)


def test_panels_are_of_the_domains_that_differ_most():
    differing = set(MANY[7:300:13])  # 23 of them
    first = curves(dict.fromkeys(MANY, 3.0))
    second = curves({name: 2.0 if name in differing else 3.0 for name in MANY})
    shown = panel_domains([first, second])
    assert shown == sorted({*differing, MANY[0]})  # one place is left for the first of the others


def test_panels_of_a_run_alone_are_of_the_first_domains():
    run = curves(dict.fromkeys(MANY, 3.0))
    assert panel_domains([run]) == MANY[:24]


def test_losses_on_held_out_text_count_where_there_are_no_others():
    losses = dict.fromkeys(MANY, 3.0)
    runs = [curves({}, losses), curves({}, losses | {MANY[-1]: 1.0, MANY[-2]: np.nan})]
    assert panel_domains(runs) == [*MANY[:23], MANY[-1]]


def test_few_domains_are_all_shown_and_nothing_is_told():
    run, mixture = curves(dict.fromkeys(MANY[:24], 3.0)), Mixture.uniform(MANY[:60])
    assert panel_domains([run]) == MANY[:24]
    assert bar_domains({"a": mixture}) == MANY[:60]


def mixtures_of(count):
    """Two mixtures: the heaviest domain of the second is the lightest of the first."""
    weights = np.arange(count, 0, -1) / (count * (count + 1) / 2)
    first = dict(zip(MANY, weights.tolist(), strict=False))
    second = dict.fromkeys(MANY[:count], 0.5 / (count - 1)) | {MANY[count - 1]: 0.5}
    return {"one": Mixture(first), "two": Mixture(second)}


def test_bars_are_of_the_largest_weights_in_any_mixture():
    mixtures = mixtures_of(300)
    shown = bar_domains(mixtures)
    assert shown == [*MANY[:59], MANY[299]]
    (axes,) = weights_figure(mixtures).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == shown
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    np.testing.assert_array_equal(dashed[0].get_xdata(), [1 / 300, 1 / 300])


@pytest.mark.parametrize("count", [2, 60, 300])
def test_no_picture_is_too_tall(count):
    run = curves(dict.fromkeys(MANY[:count], 3.0))
    second = dataclasses.replace(run, label="second")
    losses, weights = loss_figure([run, second]), weights_figure(mixtures_of(count))
    for figure in (losses, weights):
        freeze_layout(figure)
        assert 2 < figure.get_figheight() < TALLEST
    assert len(losses.axes) == 1 + min(count, 24)
    assert len(weights.axes[0].patches) == 2 * min(count, 60)


def test_captions_and_descriptions_tell_what_is_drawn(tmp_path):
    for i, (name, mixture) in enumerate(mixtures_of(300).items()):
        mixture.save(tmp_path / f"4-mixture/{name}.json")
        run = write_training_run(tmp_path / "5-base" / name, mixture.weights, name)
        domain_loss = {domain: 3.0 + i * j / 300 for j, domain in enumerate(MANY)}
        record = {"loss": 3.0, "domain_loss": domain_loss}
        write_metrics(run.root / METRICS_NAME, [{"step": step, **record} for step in (1, 2)])
    folder = RunFolder.load(tmp_path)
    weights, losses = weights_picture(folder), loss_picture(folder)
    assert "240" in weights.caption
    assert weights.description.startswith("Bar chart of the weights of 60 domains.")
    assert "24 of 300 domains" in losses.caption
    assert "a panel for each of 24 domains" in losses.description
    assert losses.figure is not None
    titles = [axes.get_title("left") for axes in losses.figure.axes[1:]]
    assert titles == MANY[-24:]
