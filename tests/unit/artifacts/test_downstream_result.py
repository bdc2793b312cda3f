from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts.downstream_result import (
    Score,
    find_part,
    part_path,
    require_same_questions,
)
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import sample_downstream, sample_part

RESULT = sample_downstream()
COMPLETE, PARTIAL = RESULT.tasks["sciq"], RESULT.tasks["race"]
OTHER_REQUESTS = {
    number: dataclasses.replace(score, requests_hash=f"other {number}")
    for number, score in COMPLETE.by_shots.items()
}


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=50))
def test_accuracy_and_its_error_match_lm_eval(values):
    metrics = pytest.importorskip("lm_eval.api.metrics")
    found = Score.of(values, [1 + value for value in values], values)
    assert found.accuracy == pytest.approx(metrics.mean(values))
    assert found.standard_error == pytest.approx(metrics.mean_stderr(values))
    assert (found.acc, found.acc_error) == (found.accuracy, found.standard_error)
    assert found.bits_per_byte == pytest.approx(1 + found.accuracy)
    assert found.bits_per_byte_error == pytest.approx(found.standard_error)
    assert Score.of(values[:1], None) == Score(values[0], None)


def test_mean_is_over_complete_tasks_with_independent_errors():
    def mean_of(*means):
        tasks = {str(n): dataclasses.replace(COMPLETE, mean=mean) for n, mean in enumerate(means)}
        return dataclasses.replace(RESULT, tasks=tasks | {"race": PARTIAL}).mean

    assert mean_of() is None
    bits = {"bits_per_byte": 1.5, "bits_per_byte_error": 0.1}
    found = mean_of(Score(0.5, 0.06, **bits), Score(0.7, 0.08))
    error = math.hypot(0.06, 0.08) / 2
    assert found is not None
    scores = found.accuracy, found.standard_error, found.bits_per_byte, found.bits_per_byte_error
    assert scores == pytest.approx((0.6, error, 1.5, 0.1))
    assert (found.acc, found.acc_error) == (None, None)
    assert mean_of(Score(1.0, None)) == Score(1.0, None)


def test_mean_acc_includes_tasks_without_acc_norm():
    normalized = dataclasses.replace(COMPLETE, mean=Score(0.5, 0.06, acc=0.3, acc_error=0.03))
    plain = dataclasses.replace(COMPLETE, metric="acc", mean=Score(0.7, 0.04))
    found = dataclasses.replace(RESULT, tasks={"sciq": normalized, "copa": plain}).mean
    assert found is not None
    assert (found.accuracy, found.acc) == pytest.approx((0.6, 0.5))
    assert found.acc_error == pytest.approx(math.hypot(0.03, 0.04) / 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"checkpoint_hash": "y", "step": 9}, None),
        ({"protocol": dataclasses.replace(RESULT.protocol, limit=9)}, "limit"),
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
    part = sample_part()
    settings = part.settings
    assert find_part(tmp_path, settings) is None
    part.save(part_path(tmp_path, "sciq", 2))
    assert find_part(tmp_path, settings) == part
    assert part.values == [0.0, 1.0, 1.0, 0.0]
    assert (part.score.accuracy, part.score.acc) == (0.5, 0.25)
    assert find_part(tmp_path, dataclasses.replace(settings, data=None)) == part
    for field in ("checkpoint_hash", "lm_eval_version", "fewshot_seed", "dtype", "data"):
        with pytest.raises(UserError, match=field):
            find_part(tmp_path, dataclasses.replace(settings, **{field: "other"}))  # type: ignore[arg-type]
    part_path(tmp_path, "sciq", 2).write_text("{")
    with pytest.raises(UserError, match=r"sciq-2shot\.json"):
        find_part(tmp_path, settings)
