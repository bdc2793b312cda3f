from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts.downstream_result import (
    Accuracy,
    DownstreamPart,
    DownstreamProtocol,
    DownstreamResult,
    Gap,
    PartSettings,
    ShotScore,
    TaskScore,
    find_part,
    part_path,
    require_same_questions,
)
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import COST, PROVENANCE

SETTINGS = PartSettings("hash", "0.4.13", "sciq", 2, None, 1234, "float32", "hub")
PROTOCOL = DownstreamProtocol("0.4.13", [0, 1], None, 1234, "float32")
SCORES = {
    number: ShotScore(0.5, 0.1, 25, truncated_requests=0, requests_hash=f"hash {number}")
    for number in (0, 1)
}
COMPLETE = TaskScore("acc_norm", "1.0", "train", SCORES, Accuracy(0.5, 0.06))
PARTIAL = dataclasses.replace(COMPLETE, by_shots={0: SCORES[0]}, mean=None)
OTHER_REQUESTS = {0: SCORES[0], 1: dataclasses.replace(SCORES[1], requests_hash="other")}
RESULT = DownstreamResult(
    checkpoint="run",
    checkpoint_hash="x",
    step=3,
    protocol=PROTOCOL,
    tasks={"sciq": COMPLETE, "race": PARTIAL},
    gaps=[Gap("race", 1, "too few documents")],
    provenance=PROVENANCE,
    cost=COST,
)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=50))
def test_accuracy_and_its_error_equal_lm_eval_s(values):
    metrics = pytest.importorskip("lm_eval.api.metrics")
    found = Accuracy.of(values)
    assert found.accuracy == pytest.approx(metrics.mean(values))
    assert found.standard_error == pytest.approx(metrics.mean_stderr(values))
    assert Accuracy.of(values[:1]) == Accuracy(values[0], None)


def test_mean_is_over_complete_tasks_with_independent_errors():
    def mean_of(*means):
        tasks = {str(n): dataclasses.replace(COMPLETE, mean=mean) for n, mean in enumerate(means)}
        return dataclasses.replace(RESULT, tasks=tasks | {"race": PARTIAL}).mean

    assert mean_of() is None
    found = mean_of(Accuracy(0.5, 0.06), Accuracy(0.7, 0.08))
    assert dataclasses.astuple(found) == pytest.approx((0.6, math.hypot(0.06, 0.08) / 2))
    assert mean_of(Accuracy(1.0, None)) == Accuracy(1.0, None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"checkpoint_hash": "y", "step": 9}, None),
        ({"protocol": dataclasses.replace(PROTOCOL, limit=9)}, "limit"),
        ({"tasks": {}}, None),
        ({"tasks": {"sciq": dataclasses.replace(COMPLETE, by_shots=OTHER_REQUESTS)}}, "requests"),
        ({"tasks": {"sciq": dataclasses.replace(COMPLETE, metric="acc")}}, "acc_norm and acc"),
    ],
)
def test_only_results_of_the_same_questions_are_comparable(changes, named):
    results = {"a": RESULT, "b": dataclasses.replace(RESULT, **changes)}
    if named is None:
        require_same_questions(results)
        return
    with pytest.raises(UserError, match=f"'a' and 'b' .*{named}"):
        require_same_questions(results)


def test_part_is_found_by_its_settings(tmp_path):
    part = DownstreamPart(SETTINGS, "acc", "1.0", "train", "0110", 3, "r", "q", COST)
    assert find_part(tmp_path, SETTINGS) is None
    part.save(part_path(tmp_path, "sciq", 2))
    assert find_part(tmp_path, SETTINGS) == part
    assert part.values == [0.0, 1.0, 1.0, 0.0]
    assert find_part(tmp_path, dataclasses.replace(SETTINGS, data=None)) == part
    for field in ("checkpoint_hash", "lm_eval_version", "fewshot_seed", "dtype", "data"):
        with pytest.raises(UserError, match=field):
            find_part(tmp_path, dataclasses.replace(SETTINGS, **{field: "other"}))  # type: ignore[arg-type]
    part_path(tmp_path, "sciq", 2).write_text("{")
    with pytest.raises(UserError, match=r"sciq-2shot\.json"):
        find_part(tmp_path, SETTINGS)
