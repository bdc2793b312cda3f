from __future__ import annotations

import dataclasses

import pytest

from megatron_chameleon.artifacts import Mixture, Sweep
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import sample_sweep


def test_values_keep_their_types(tmp_path):
    sample_sweep(tmp_path).save()
    sweep = Sweep.load(tmp_path)
    assert [type(value) for value in sweep.centre.knobs.values()] == [str, int, float]
    assert [type(value) for value in sweep.axes["ridge"]] == [float, float]
    assert [type(value) for value in sweep.axes["train_iters"]] == [int, int]


def test_an_axis_is_in_the_order_of_its_values_wherever_the_centre_stands(tmp_path):
    sweep = sample_sweep(tmp_path)
    assert [point.knobs["ridge"] for point in sweep.along("ridge")] == [1.0, 10.0]
    assert [point.knobs["train_iters"] for point in sweep.along("train_iters")] == [2000, 5000]
    assert sweep.along("ridge")[1] is sweep.along("train_iters")[0] is sweep.centre


def test_a_value_without_a_point_is_told(tmp_path):
    sweep = sample_sweep(tmp_path)
    short = dataclasses.replace(sweep, points=sweep.points[:2])
    with pytest.raises(UserError, match=r"sweep\.json: field points: missing ridge 1"):
        short.along("ridge")
    with pytest.raises(UserError, match=r"sweep\.json: field points is empty; "):
        dataclasses.replace(sweep, points=[]).along("ridge")


def test_a_mixture_that_has_changed_is_told(tmp_path):
    sweep = sample_sweep(tmp_path)
    path = tmp_path / sweep.centre.mixture
    mixture = Mixture({"a": 0.25, "b": 0.75})
    mixture.save(path)
    centre = dataclasses.replace(sweep.centre, mixture_hash=mixture.hash)
    assert sweep.load_mixture(centre) == mixture
    Mixture({"a": 0.5, "b": 0.5}).save(path)
    with pytest.raises(UserError, match=r"0\.json has changed since .*sweep\.json was written"):
        sweep.load_mixture(centre)
