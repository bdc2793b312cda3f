"""Hundreds of domains: which have a panel or a bar, how tall the pictures are, what is told."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.artifacts.training_run import METRICS_NAME, write_metrics
from megatron_chameleon.report.curves import Curve, RunCurves
from megatron_chameleon.report.figures import loss_figure, settle, weights_figure
from megatron_chameleon.report.pictures import loss_picture, weights_picture
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.shown_domains import (
    bar_domains,
    bars_told,
    panel_domains,
    panels_told,
)
from tests.unit.report.report_samples import write_training_run

MANY = [f"domain {i:03d}" for i in range(300)]
TALLEST = 60  # inches


def curves(last, validation=None):
    """A run whose losses fall from 9 to ``last`` (name -> loss)."""
    steps = np.arange(1.0, 4.0)
    training, held_out = (
        {name: Curve(steps, np.array([9.0, 8.0, loss])) for name, loss in found.items()}
        for found in (last, validation or {})
    )
    return RunCurves("run", Curve(steps, steps), training, held_out)


def test_panels_are_of_the_domains_that_differ_most():
    differing = set(MANY[7:300:13])  # 23 of them
    first = curves(dict.fromkeys(MANY, 3.0))
    second = curves({name: 2.0 if name in differing else 3.0 for name in MANY})
    shown = panel_domains([first, second])
    assert shown == sorted({*differing, MANY[0]})  # one place is left for the first of the others
    assert "those whose last losses (of the running mean) differ most" in panels_told(
        [first, second]
    )
    assert "24 of 300 domains" in panels_told([first, second])


def test_panels_of_a_run_alone_are_of_the_first_domains():
    run = curves(dict.fromkeys(MANY, 3.0))
    assert panel_domains([run]) == MANY[:24]
    assert panels_told([run]) == " There are panels of the first 24 of 300 domains."


def test_losses_on_held_out_text_count_where_there_are_no_others():
    losses = dict.fromkeys(MANY, 3.0)
    runs = [curves({}, losses), curves({}, losses | {MANY[-1]: 1.0, MANY[-2]: np.nan})]
    assert panel_domains(runs) == [*MANY[:23], MANY[-1]]


def test_few_domains_are_all_shown_and_nothing_is_told():
    run, mixture = curves(dict.fromkeys(MANY[:24], 3.0)), Mixture.uniform(MANY[:60])
    assert panel_domains([run]) == MANY[:24]
    assert panels_told([run]) == bars_told({"a": mixture}) == ""
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
    assert "Of 300 domains the 60 with the largest weights" in bars_told(mixtures)
    assert "240 are left out" in bars_told(mixtures)
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
        settle(figure)
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
    assert weights.caption.endswith("240 are left out here and stand in the table.")
    assert weights.description.startswith("Bar chart of the weights of 60 domains.")
    assert "panels of 24 of 300 domains" in losses.caption
    assert "a panel for each of 24 domains" in losses.description
    assert losses.figure is not None
    titles = [axes.get_title("left") for axes in losses.figure.axes[1:]]
    assert titles == MANY[-24:]
