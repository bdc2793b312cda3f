"""Curves of more points than a picture has."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.report.curves import Curve


@pytest.fixture
def curve(rng):
    return Curve(np.arange(1.0, 10_001.0), rng.normal(3.0, 0.5, 10_000))


def test_the_outline_keeps_every_peak_that_would_be_seen(curve):
    outline = curve.outline(200)
    assert 150 < len(outline.steps) <= 200
    assert np.all(np.diff(outline.steps) > 0)
    by_step = dict(zip(curve.steps, curve.losses, strict=True))
    assert [by_step[step] for step in outline.steps] == outline.losses.tolist()
    for stretch in np.split(curve.losses, 100):
        assert {stretch.min(), stretch.max()} <= set(outline.losses)


def test_every_so_many_keeps_both_ends(curve):
    fewer = curve.every(50)
    assert len(fewer.steps) == 50
    assert (fewer.steps[0], fewer.steps[-1]) == (1.0, 10_000.0)
    assert np.ptp(np.diff(fewer.steps)) <= 1


@pytest.mark.parametrize("count", [0, 1, 50])
def test_a_curve_of_few_points_is_kept_as_it_is(count):
    curve = Curve(np.arange(float(count)), np.arange(float(count)))
    assert curve.every(50) is curve
    assert curve.outline(50) is curve
