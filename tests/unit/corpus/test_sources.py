from __future__ import annotations

import pytest

from megatron_chameleon.corpus.sources import MAX_DOMAIN_BYTES, SourceFile, find_sources
from megatron_chameleon.errors import UserError

JSON_LINES = ["[x].jsonl", "a.jsonl", "b.jsonl", "sub/c.jsonl.gz", "sub/d.jsonl.zst"]
FILES = [*JSON_LINES[::-1], "e.json", "notes.txt"]


@pytest.fixture
def folder(tmp_path):
    for name in FILES:
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "texts"


def names(folder, found):
    return [(str(source.path.relative_to(folder)), source.domain) for source in found]


def test_files_are_taken_in_the_order_given(folder):
    found = find_sources([f"x={folder}/b.jsonl", f"y={folder}/a.jsonl", f"{folder}/e.json"])
    assert names(folder, found) == [("b.jsonl", "x"), ("a.jsonl", "y"), ("e.json", None)]


def test_a_folder_is_searched_at_any_depth_for_json_lines(folder):
    found = find_sources([f"x={folder}"])
    assert names(folder, found) == [(name, "x") for name in JSON_LINES]


def test_globs_are_sorted_and_reach_into_folders(folder):
    assert names(folder, find_sources([f"x={folder}/?.jsonl"])) == [
        ("a.jsonl", "x"),
        ("b.jsonl", "x"),
    ]
    assert names(folder, find_sources([f"x={folder}/**/*.zst"])) == [("sub/d.jsonl.zst", "x")]


def test_a_name_that_exists_is_no_pattern(folder):
    assert names(folder, find_sources([f"{folder}/[x].jsonl"])) == [("[x].jsonl", None)]


def test_a_file_named_twice_is_read_once_per_domain(folder):
    given = [f"x={folder}/a.jsonl", f"x={folder}/a*.jsonl", f"y={folder}/a.jsonl"]
    assert names(folder, find_sources(given)) == [("a.jsonl", "x"), ("a.jsonl", "y")]


def test_an_equals_sign_after_a_slash_belongs_to_the_path(tmp_path):
    path = tmp_path / "lang=en" / "a.jsonl"
    path.parent.mkdir()
    path.touch()
    assert find_sources([str(path)]) == [SourceFile(path, None)]
    assert find_sources([f"english={path}"]) == [SourceFile(path, "english")]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "names nothing to read"),
        (["x={folder}/absent.jsonl"], "no such file"),
        (["x={folder}/*.parquet"], "no such file"),
        (["x={folder}/notes.txt"], "unknown format"),
        (["x={folder}/empty"], "no file of JSON lines"),
        (["={folder}/a.jsonl"], "NAME=PATH"),
        (["x="], "NAME=PATH"),
        (["n" * (MAX_DOMAIN_BYTES + 1) + "={folder}/a.jsonl"], "NAME of at most"),
    ],
)
def test_inputs_that_lead_to_nothing_are_refused(folder, given, problem):
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=problem):
        find_sources([text.replace("{folder}", str(folder)) for text in given])
