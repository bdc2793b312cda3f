"""Downstream accuracy: tables, missing tasks, and results that cannot be compared."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_chameleon.artifacts.downstream_result import Gap
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.downstream import compare_downstream, downstream_tables
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.tables import is_best
from tests.unit.report.samples import (
    CHAMELEON,
    DOWNSTREAM_PROTOCOL,
    UNIFORM,
    downstream,
    rows_of,
    save,
)


def tables_of(root, uniform, chameleon):
    save(root, f"{UNIFORM}-downstream", uniform)
    save(root, f"{CHAMELEON}-downstream", chameleon)
    return downstream_tables(compare_downstream(RunFolder.load(root)))


def marks_of(table):
    return {row[0]: [is_best(cell) for cell in row[1:]] for row in (*table.rows, *table.summary)}


def test_means_over_shots_averages_and_counts_are_shown_in_percent(root):
    mean, bits, by_shots = tables_of(
        root,
        downstream({"sciq": {0: 0.5, 1: 0.7}, "copa": {0: 0.4, 1: 0.4}}),
        downstream({"sciq": {0: 0.6, 1: 0.7}, "copa": {0: 0.1, 1: 0.5}}),
    )
    assert mean.header == ("task", "Uniform", "Chameleon")
    found = rows_of(mean)
    assert found["sciq"] == ["60.0 ± 2.0", "65.0 ± 2.0"]
    assert found["copa"] == ["40.0 ± 2.0", "30.0 ± 2.0"]
    # Both tasks have an error of 2, so the average has an error of sqrt(4 + 4) / 2.
    assert found["average"] == ["50.0 ± 1.4", "47.5 ± 1.4"]
    assert found["tasks better than Uniform"] == ["-", "1 of 2"]
    assert marks_of(mean)["sciq"] == [False, True]
    assert marks_of(mean)["average"] == [True, False]
    assert rows_of(bits)["sciq"] == ["1.4000 ± 0.0300", "1.3500 ± 0.0300"]
    assert rows_of(bits)["average"] == ["1.5000 ± 0.0212", "1.5250 ± 0.0212"]
    assert rows_of(bits)["tasks better than Uniform"] == ["-", "1 of 2"]
    assert marks_of(bits)["sciq"] == [False, True]
    assert rows_of(by_shots)["copa, 0-shot"] == ["40.0 ± 1.0", "10.0 ± 1.0"]
    assert rows_of(by_shots)["average, 1-shot"] == ["55.0 ± 0.7", "60.0 ± 0.7"]


def test_accuracies_without_normalization_have_their_own_table(root):
    uniform = downstream({"sciq": {0: 0.5, 1: 0.7}, "copa": {0: 0.4, 1: 0.4}})
    sciq = dataclasses.replace(uniform.tasks["sciq"], metric="acc_norm")
    assert sciq.mean is not None
    both = dataclasses.replace(sciq, mean=dataclasses.replace(sciq.mean, acc=0.3, acc_error=0.03))
    mean, acc, _, _ = tables_of(
        root,
        dataclasses.replace(uniform, tasks={**uniform.tasks, "sciq": both}),
        dataclasses.replace(uniform, tasks={**uniform.tasks, "sciq": sciq}),
    )
    assert rows_of(mean)["sciq"] == ["60.0 ± 2.0", "60.0 ± 2.0"]
    assert rows_of(acc)["sciq"] == ["30.0 ± 3.0", "-"]
    assert rows_of(acc)["copa"] == rows_of(mean)["copa"]
    assert rows_of(acc)["average"] == ["40.0 ± 2.0", "40.0 ± 2.0"]  # over copa


def test_a_task_that_one_run_lacks_is_shown_as_a_dash_and_not_averaged(root):
    whole = {"sciq": {0: 0.5, 1: 0.7}, "race": {0: 0.9, 1: 0.9}}
    mean, _, by_shots = tables_of(
        root,
        downstream(whole),
        downstream({"sciq": {0: 0.4, 1: 0.4}}, gaps=[Gap("race", None, "no data set")]),
    )
    assert rows_of(mean)["race"] == ["90.0 ± 2.0", "-"]
    assert rows_of(mean)["average"] == ["60.0 ± 2.0", "40.0 ± 2.0"]
    assert rows_of(mean)["tasks better than Uniform"] == ["-", "0 of 1"]
    assert "Not evaluated for Chameleon: race: no data set." in mean.notes
    assert any("over the 1 of 2 tasks that all runs have" in note for note in mean.notes)
    assert rows_of(by_shots)["average, 0-shot"] == ["50.0 ± 1.0", "40.0 ± 1.0"]


def test_an_unfinished_task_has_accuracies_by_shots_but_no_mean(root):
    mean, _, by_shots = tables_of(
        root, downstream({"sciq": {0: 0.5}}), downstream({"sciq": {0: 0.6, 1: 0.7}})
    )
    rows = rows_of(mean) | rows_of(by_shots)
    assert rows["sciq"] == ["-", "65.0 ± 2.0"]
    assert rows["sciq, 1-shot"] == ["-", "70.0 ± 1.0"]
    assert rows["average"] == rows["average, 1-shot"] == ["-", "-"]
    assert any(note.startswith("Not evaluated for Uniform: sciq, 1-shot: ") for note in mean.notes)


def test_results_of_different_protocols_are_rejected(root):
    tasks = {"sciq": {0: 0.5, 1: 0.7}}
    other = dataclasses.replace(DOWNSTREAM_PROTOCOL, limit=9)
    with pytest.raises(UserError, match="limit is"):
        tables_of(root, downstream(tasks), downstream(tasks, other))
