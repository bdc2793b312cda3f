from __future__ import annotations

import json
import os

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.report.page import LIST_NAME, write_report


def files_in(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_what_no_longer_belongs_is_removed_and_all_else_left(tmp_path):
    folder = tmp_path / "report"
    write_report(folder, {"a.png": b"1", "tables/x.csv": b"2", "tables/y.csv": b"3"})
    (folder / "mine.csv").write_text("kept")
    (folder / "tables/mine.csv").write_text("kept")
    write_report(folder, {"a.png": b"4", "tables/x.csv": b"5"})
    expected = ["a.png", "mine.csv", LIST_NAME, "tables/mine.csv", "tables/x.csv"]
    assert files_in(folder) == sorted(expected)
    assert (folder / "a.png").read_bytes() == b"4"


@pytest.mark.parametrize("name", ["../kept", "/{root}/kept", "a/../../kept", "a/b/kept"])
def test_a_list_that_was_changed_removes_nothing_elsewhere(tmp_path, name):
    folder = tmp_path / "report"
    (folder / "a/b").mkdir(parents=True)
    kept = [tmp_path / "kept", folder / "a/b/kept"]
    for path in kept:
        path.write_text("kept")
    listed = name.replace("/{root}", str(tmp_path))
    (folder / LIST_NAME).write_text(json.dumps({"files": [listed]}))
    write_report(folder, {"a.png": b"1"})
    assert all(path.read_text() == "kept" for path in kept)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": 3}', '{"mine": 1}'])
def test_nothing_is_written_beside_a_list_that_is_no_reports(tmp_path, content):
    (tmp_path / LIST_NAME).write_text(content)
    with pytest.raises(UserError, match=LIST_NAME):
        write_report(tmp_path, {"a.png": b"1"})
    assert files_in(tmp_path) == [LIST_NAME]
    assert (tmp_path / LIST_NAME).read_text() == content


def test_a_file_of_other_origin_is_not_replaced(tmp_path):
    (tmp_path / "a.png").write_text("mine")
    with pytest.raises(UserError, match=r"a\.png exists"):
        write_report(tmp_path, {"b.png": b"1", "a.png": b"2"})
    assert files_in(tmp_path) == ["a.png"]
    write_report(tmp_path, {"b.png": b"1"})
    with pytest.raises(UserError, match=r"a\.png exists"):
        write_report(tmp_path, {"b.png": b"2", "a.png": b"2"})
    assert (tmp_path / "a.png").read_text() == "mine"
    assert (tmp_path / "b.png").read_bytes() == b"1"


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_report(tmp_path / "file" / "report", {"a.png": b"1"})


def test_after_a_failure_the_next_report_still_knows_what_lies_there(tmp_path):
    write_report(tmp_path, {"a.png": b"1"})
    (tmp_path / "tables").write_text("a file in the way")
    with pytest.raises(UserError, match="cannot write"):
        write_report(tmp_path, {"b.png": b"2", "tables/x.csv": b"3"})
    os.remove(tmp_path / "tables")
    write_report(tmp_path, {"c.png": b"4"})
    assert files_in(tmp_path) == ["c.png", LIST_NAME]
