from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import pytest
from matplotlib.collections import LineCollection

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.figures import COLORS, MOST_NAMED, png, sweep_figure
from megatron_chameleon.report.page import report_stability
from megatron_chameleon.report.tables import terminal_table
from megatron_chameleon.report.weights import MOST_ROWS, sweep_table, swept_axes
from tests.unit.report.report_samples import write_sweep

# Chameleon, ICML 2025, appendix: weights at ridges 1, 10 and 100.
SLIMPAJAMA = {
    "arxiv": (0.080, 0.083, 0.087),
    "book": (0.159, 0.164, 0.173),
    "cc": (0.178, 0.202, 0.201),
    "c4": (0.243, 0.247, 0.258),
    "github": (0.097, 0.082, 0.057),
    "stackexchange": (0.152, 0.149, 0.128),
    "wikipedia": (0.081, 0.073, 0.095),
}
ODD_NAMES = ["$x_1$ and {y", "_hidden", "a|b_<x>", "n" * 90, "line\nbreak", "plain"]


def mixture_of(weights: dict[str, float]) -> Mixture:
    total = sum(weights.values())
    shares = {name: weight / total for name, weight in weights.items()}
    intervals = {name: (0.9 * share, 1.2 * share) for name, share in shares.items()}
    return Mixture(shares, intervals=intervals, confidence=0.95)


@pytest.fixture
def paper(tmp_path):
    """Ridges 10, 1 and 100 as the values 1, 2 and 3 of a sweep, and a knob that does nothing."""
    columns = [mixture_of({n: w[i] for n, w in SLIMPAJAMA.items()}) for i in (1, 0, 2)]
    return write_sweep(tmp_path / "run", {"ridge": columns, "layer": columns[:1] * 2})


def random_axes(root, names, count=3, seed=0):
    rng = np.random.default_rng(seed)
    draws = rng.dirichlet(np.full(len(names), 9.0), size=count)
    mixtures = [mixture_of(dict(zip(names, draw.tolist(), strict=True))) for draw in draws]
    return swept_axes(write_sweep(root, {"train_iters": mixtures, "num_windows": mixtures[:2]}))


def test_changes_and_distances_are_to_the_centre(paper):
    axis, still = swept_axes(paper)
    one, centre, other = (
        np.array([w[i] for w in SLIMPAJAMA.values()]) / sum(w[i] for w in SLIMPAJAMA.values())
        for i in (0, 1, 2)
    )
    assert (axis.label, axis.values, axis.centre) == ("ridge", ("1", "2", "3"), 0)
    np.testing.assert_allclose(axis.changes, [centre * 0, one - centre, other - centre])
    half = [0, np.abs(one - centre).sum() / 2, np.abs(other - centre).sum() / 2]
    np.testing.assert_allclose(axis.distances, half)
    np.testing.assert_allclose(axis.intervals[1], np.stack([0.9 * one, 1.2 * one], axis=1))
    assert axis.confidence == 0.95
    assert "github" in axis.sentence
    assert (still.label, still.distances.tolist()) == ("layer", [0.0, 0.0])


def test_the_table_shows_weights_changes_and_distances(paper):
    axis, still = swept_axes(paper)
    text = terminal_table(sweep_table(axis))
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert lines["github"] == [
        *(f"{weight:.4f}" for weight in axis.weights[:, axis.names.index("github")]),
        f"{np.abs(axis.changes[:, axis.names.index('github')]).max():.4f}",
    ]
    assert lines["total"][1:-1] == [f"{distance:.4f}" for distance in axis.distances]
    assert lines["total"][-1] == f"{axis.distances.max():.4f}"
    assert "(centre)" in text
    change = axis.changes[2, axis.names.index("github")]
    assert f"github {change:+.4f} at 3" in " ".join(text.split())
    assert still.sentence == "Over layer no weight changes"


def test_of_many_domains_those_that_move_are_listed(tmp_path):
    names = [f"domain {i}" for i in range(MOST_ROWS + 5)]
    weights = dict.fromkeys(names, 1.0)
    sweep = write_sweep(
        tmp_path / "run", {"ridge": [mixture_of(weights), mixture_of({**weights, names[-1]: 3.0})]}
    )
    (axis,) = swept_axes(sweep)
    table = sweep_table(axis)
    assert len(table.rows) == MOST_ROWS
    assert table.rows[-1][0] == names[-1]
    assert table.notes[0] == "5 other domains move by less."


def test_mixtures_of_other_domains_are_refused(tmp_path):
    mixtures = [mixture_of({"a": 1.0, "b": 2.0}), mixture_of({"a": 1.0, "c": 2.0})]
    sweep = write_sweep(tmp_path / "run", {"ridge": mixtures})
    with pytest.raises(UserError, match=r"ridge-2\.json has other domains than .*ridge-1\.json"):
        swept_axes(sweep)


def test_a_line_goes_through_the_weights_of_each_domain(paper):
    axes = swept_axes(paper)
    figure = sweep_figure(axes)
    for panel, axis in zip(figure.axes, axes, strict=True):
        lines = [line for line in panel.lines if line.get_linestyle() != "--"]
        drawn = np.array([line.get_ydata() for line in lines])
        np.testing.assert_array_equal(drawn, axis.weights.T)
        assert [text.get_text() for text in panel.get_xticklabels()] == list(axis.values)
        assert panel.get_xlabel() == axis.label
        assert f"total variation {axis.distances.max():.3f}" in panel.get_title(loc="left")
    assert figure.axes[0].get_ylabel() == "weight (share of training tokens)"
    assert len({line.get_color() for line in figure.axes[0].lines[:7]}) == 7
    assert "95% bootstrap intervals" in figure.get_supxlabel()


def test_a_dashed_line_stands_at_the_centre(paper):
    axis = dataclasses.replace(swept_axes(paper)[0], centre=2)
    (panel,) = sweep_figure([axis]).axes
    (dashed,) = [line for line in panel.lines if line.get_linestyle() == "--"]
    np.testing.assert_array_equal(dashed.get_xdata(), [2, 2])


def test_bars_are_the_intervals_and_do_not_overlap(paper):
    axis = swept_axes(paper)[0]
    (panel,) = sweep_figure([axis]).axes
    bars = cast(list[LineCollection], panel.collections)
    ends = np.array([[segment[:, 1] for segment in bar.get_segments()] for bar in bars])
    np.testing.assert_allclose(ends, axis.intervals.transpose(1, 0, 2))
    positions = sorted(segment[0, 0] for bar in bars for segment in bar.get_segments())
    assert np.diff(positions).min() > 0.03


def test_any_name_is_drawn_as_it_is(tmp_path):
    figure = sweep_figure(random_axes(tmp_path / "run", ODD_NAMES))
    png(figure)
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[:3] == ODD_NAMES[:3]
    assert texts[4:] == ["line break", "plain", "centre"]
    box = legend.get_window_extent()
    assert not any(box.overlaps(panel.get_window_extent()) for panel in figure.axes)


def test_of_many_domains_the_light_ones_are_grey(tmp_path):
    names = [f"domain {i}" for i in range(MOST_NAMED + 9)]
    (axis, _) = random_axes(tmp_path / "run", names)
    figure = sweep_figure([axis])
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert len(texts) == MOST_NAMED + 2
    assert texts[-2:] == ["other domains", "centre"]
    heaviest = sorted(names, key=lambda n: -axis.weights[axis.centre, names.index(n)])[:MOST_NAMED]
    assert set(texts[:-2]) == set(heaviest)
    named = [line for line in figure.axes[0].lines if line.get_color() in COLORS]
    styles = {(line.get_color(), line.get_marker()) for line in named}
    assert len(styles) == MOST_NAMED


def test_the_report_writes_both_forms_and_says_what_it_took(paper, capsys):
    report_stability(paper)
    folder = paper.root / "7-report"
    assert sorted(path.name for path in folder.iterdir()) == ["stability.pdf", "stability.png"]
    assert (folder / "stability.pdf").read_bytes().startswith(b"%PDF")
    said = capsys.readouterr().out
    assert "Weights over ridge" in said
    assert "Weights over layer" in said
    assert "4 mixtures took 3.00e+12 FLOPs and 2 device-hours" in said
    assert f"next: tools/pretrain_gpt.py --mixture {paper.root / paper.centre.mixture}" in said
