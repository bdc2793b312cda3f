from __future__ import annotations

import dataclasses

import pytest

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import sample_sweep


def test_axis_has_a_point_for_each_value(tmp_path):
    sweep = sample_sweep(tmp_path)
    assert [point.settings["ridge"] for point in sweep.along("ridge")] == [1.0, 10.0]
    assert sweep.along("ridge")[1] is sweep.along("train_iters")[0] is sweep.centre
    with pytest.raises(UserError, match=r"sweep\.json: field points: missing ridge 1"):
        dataclasses.replace(sweep, points=sweep.points[:2]).along("ridge")


def test_changed_mixture_is_rejected(tmp_path):
    sweep = sample_sweep(tmp_path)
    path = tmp_path / sweep.centre.mixture
    mixture = Mixture({"a": 0.25, "b": 0.75})
    mixture.save(path)
    centre = dataclasses.replace(sweep.centre, mixture_hash=mixture.hash)
    assert sweep.load_mixture(centre) == mixture
    Mixture({"a": 0.5, "b": 0.5}).save(path)
    with pytest.raises(UserError, match=r"0\.json has changed since .*sweep\.json was written"):
        sweep.load_mixture(centre)
