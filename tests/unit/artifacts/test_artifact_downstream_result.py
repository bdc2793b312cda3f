from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Cost, Provenance
from megatron_chameleon.artifacts.downstream_part import (
    DownstreamPart,
    PartSettings,
    find_part,
    part_path,
)
from megatron_chameleon.artifacts.downstream_result import (
    Accuracy,
    DownstreamProtocol,
    DownstreamResult,
    Gap,
    ShotScore,
    TaskScore,
    require_same_questions,
)
from megatron_chameleon.errors import UserError

MADE = Provenance([], {}, {}, {}, None, "2026-01-01")
SETTINGS = PartSettings("hash", "0.4.13", "sciq", 2, None, 1234, "float32", "hub")


def sample_result(**changes):
    """Two tasks, of which one lacks a number of shots."""
    scores = {
        number: ShotScore(0.5, 0.1, 25, truncated_requests=0, requests_hash=f"asked {number}")
        for number in (0, 1)
    }
    whole = TaskScore("acc_norm", "1.0", "train", scores, Accuracy(0.5, 0.06))
    part = dataclasses.replace(whole, by_shots={0: scores[0]}, mean=None)
    result = DownstreamResult(
        checkpoint="run",
        checkpoint_hash="x",
        step=3,
        protocol=DownstreamProtocol("0.4.13", [0, 1], None, 1234, "float32"),
        tasks={"sciq": whole, "race": part},
        gaps=[Gap("race", 1, "too few documents")],
        provenance=MADE,
        cost=Cost(1e9, 2.0, 1.0, 2),
    )
    return dataclasses.replace(result, **changes)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=50))
def test_accuracy_and_its_error_are_lm_eval_s(values):
    metrics = pytest.importorskip("lm_eval.api.metrics")
    found = Accuracy.of(values)
    assert found.accuracy == pytest.approx(metrics.mean(values))
    assert found.standard_error == pytest.approx(metrics.mean_stderr(values))


def test_one_question_has_no_error():
    assert Accuracy.of([1.0]) == Accuracy(1.0, None)


def test_a_result_is_read_as_it_was_written(tmp_path):
    sample_result().save(tmp_path / "result.json")
    assert DownstreamResult.load(tmp_path / "result.json") == sample_result()


def test_the_mean_is_over_complete_tasks_and_adds_up_their_errors():
    result = sample_result()
    assert result.complete_tasks == ["sciq"]
    assert dataclasses.astuple(result.mean) == pytest.approx((0.5, 0.06))
    other = dataclasses.replace(result.tasks["sciq"], mean=Accuracy(0.7, 0.08))
    both = sample_result(tasks={"sciq": result.tasks["sciq"], "piqa": other})
    assert dataclasses.astuple(both.mean) == pytest.approx((0.6, math.hypot(0.06, 0.08) / 2))


def test_without_a_complete_task_there_is_no_mean():
    assert sample_result(tasks={}).mean is None


def test_a_mean_over_a_task_without_an_error_has_none():
    task = dataclasses.replace(sample_result().tasks["sciq"], mean=Accuracy(1.0, None))
    assert sample_result(tasks={"sciq": task}).mean == Accuracy(1.0, None)


def test_answers_to_the_same_questions_can_be_compared():
    require_same_questions({"a": sample_result(), "b": sample_result(checkpoint_hash="y", step=9)})


def asked_otherwise(**changes):
    task = sample_result().tasks["sciq"]
    score = dataclasses.replace(task.by_shots[1], requests_hash="asked otherwise")
    changed = dataclasses.replace(task, by_shots={0: task.by_shots[0], 1: score})
    return {"sciq": dataclasses.replace(changed, **changes)}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"protocol": DownstreamProtocol("0.4.13", [0, 1], 9, 1234, "float32")}, "limit is None"),
        ({"protocol": DownstreamProtocol("0.4.13", [0], None, 1234, "float32")}, "shots is"),
        ({"tasks": {}}, "one of them alone has sciq"),
        ({"tasks": asked_otherwise()}, "the requests of sciq differ"),
        ({"tasks": asked_otherwise(metric="acc")}, "sciq gave acc_norm and acc"),
    ],
)
def test_answers_to_other_questions_are_refused(changes, told):
    with pytest.raises(UserError, match=f"'a' and 'b' were not asked the same: {told}"):
        require_same_questions({"a": sample_result(), "b": sample_result(**changes)})


def sample_part():
    """Four questions."""
    return DownstreamPart(SETTINGS, "acc", "1.0", "train", "0110", 3, "asked", "questions", Cost())


def test_a_part_is_found_by_its_settings(tmp_path):
    part = sample_part()
    assert find_part(tmp_path, SETTINGS) is None
    part.save(tmp_path)
    assert find_part(tmp_path, SETTINGS) == part
    assert part.values == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"checkpoint_hash": "other"}, "checkpoint_hash is hash there and other here"),
        ({"lm_eval_version": "0.5"}, "lm_eval_version is 0.4.13 there and 0.5 here"),
        ({"fewshot_seed": 1}, "fewshot_seed is 1234 there and 1 here"),
        ({"dtype": "bfloat16"}, "dtype is float32 there"),
        ({"data": "sha256:1f"}, "data is hub there and sha256:1f here"),
    ],
)
def test_a_part_of_other_settings_is_refused(tmp_path, changes, told):
    sample_part().save(tmp_path)
    with pytest.raises(UserError, match=told):
        find_part(tmp_path, dataclasses.replace(SETTINGS, **changes))


def test_a_part_does_where_nothing_is_known_of_the_data(tmp_path):
    sample_part().save(tmp_path)
    assert find_part(tmp_path, dataclasses.replace(SETTINGS, data=None)) == sample_part()


def test_a_damaged_part_is_told_with_the_way_out(tmp_path):
    part_path(tmp_path, "sciq", 2).write_text("{")
    with pytest.raises(UserError, match=r"sciq-2shot\.json.*anew if it is deleted"):
        find_part(tmp_path, SETTINGS)
