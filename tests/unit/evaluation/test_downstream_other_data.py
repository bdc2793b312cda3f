"""Finished parts beside data sets that have changed, and outputs that cannot be written."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from megatron_chameleon.artifacts.downstream_part import PartSettings
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream import DownstreamPlan, evaluate_downstream
from megatron_chameleon.evaluation.options import DownstreamOptions
from megatron_chameleon.evaluation.tasks import TaskLibrary
from tests.fixtures.task_data import write_task_data
from tests.unit.evaluation.conftest import DOCUMENTS


@pytest.fixture
def options(text_checkpoint, task_data, tmp_path):
    """One task without examples."""
    return DownstreamOptions(
        checkpoint=text_checkpoint.checkpoint,
        output=tmp_path / "6-evaluation" / "uniform.json",
        tasks=("sciq",),
        shots=(0,),
        data_dir=task_data,
    )


@pytest.fixture
def other_data(tmp_path):
    """Copies with more questions."""
    return write_task_data(tmp_path / "other", DOCUMENTS + 1)


def test_answers_about_another_copy_of_the_data_are_refused(options, other_data):
    evaluate_downstream(options)
    elsewhere = dataclasses.replace(options, data_dir=other_data)
    with pytest.raises(UserError, match=r"sciq-0shot\.json is of another .*: data is sha256:"):
        evaluate_downstream(elsewhere)
    with pytest.raises(UserError, match=r"data is sha256:.* there and hub here"):
        evaluate_downstream(dataclasses.replace(options, data_dir=None))


def test_a_copy_that_was_moved_is_the_same_data(options, task_data, tmp_path):
    first = evaluate_downstream(options)
    moved = Path(shutil.copytree(task_data, tmp_path / "moved"))
    (moved / "allenai" / "sciq" / ".cache").mkdir()
    (moved / "allenai" / "sciq" / ".cache" / "downloaded.metadata").write_text("at noon")
    assert evaluate_downstream(dataclasses.replace(options, data_dir=moved)).tasks == first.tasks


def test_other_configurations_beside_a_copy_do_not_matter(task_data, tmp_path):
    some = Path(shutil.copytree(task_data, tmp_path / "some"))
    before = TaskLibrary(["copa", "multirc"], some)
    known = [before.data_of(task) for task in ("copa", "multirc")]
    (some / "aps" / "super_glue" / "multirc" / "train.jsonl").write_text("{}\n")
    after = TaskLibrary(["copa", "multirc"], some)
    assert after.data_of("copa") == known[0]
    assert after.data_of("multirc") != known[1]


def test_what_was_answered_from_elsewhere_stays_without_a_copy(options, tmp_path):
    first = evaluate_downstream(options)
    (tmp_path / "logiqa-alone").mkdir()
    again = dataclasses.replace(options, data_dir=tmp_path / "logiqa-alone")
    assert evaluate_downstream(again).tasks == first.tasks


def test_questions_that_changed_between_shots_leave_a_gap(options, other_data, monkeypatch, capsys):
    """As of a data set that was changed on the hub, of which no hash is known beforehand."""
    both = dataclasses.replace(options, tasks=("sciq", "winogrande"))
    evaluate_downstream(both)
    settings = DownstreamPlan.settings

    def of_the_hub(self, task, shots):
        known: PartSettings = settings(self, task, shots)
        return dataclasses.replace(known, data=None)

    monkeypatch.setattr(DownstreamPlan, "settings", of_the_hub)
    shutil.rmtree(other_data / "allenai" / "winogrande")
    shutil.copytree(
        options.data_dir / "allenai" / "winogrande", other_data / "allenai" / "winogrande"
    )
    result = evaluate_downstream(dataclasses.replace(both, data_dir=other_data, shots=(0, 1)))
    (gap,) = result.gaps
    assert gap.task == "sciq"
    assert "differ between numbers of shots" in gap.reason
    assert str(options.output.with_suffix("") / "sciq-*shot.json") in gap.reason
    assert result.complete_tasks == ["winogrande"]
    assert "mean of 1 of 2 tasks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("uniform", "uniform: must end in .json"),
        ("folder.json", "folder.json is a folder"),
        ("mixture.json", "mixture.json .*'mixture'"),
        ("mixture.json/uniform.json", "mixture.json cannot be written to"),
        ("notes.json", r"--work-dir \S+/notes: .* cannot be written to; choose another folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_told_at_once(options, tmp_path, name, message):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "mixture.json").write_text(json.dumps({"kind": "mixture"}))
    (tmp_path / "notes").write_text("a file")
    with pytest.raises(UserError, match=message):
        evaluate_downstream(dataclasses.replace(options, output=tmp_path / name))
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == ["folder.json", "mixture.json", "notes"]
