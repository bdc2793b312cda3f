from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron_chameleon.corpus.options import MAX_DOMAIN_BYTES, DomainOptions, SourceOptions
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.sources import Piece, Source, find_sources
from megatron_chameleon.errors import UserError

JSON_LINES = ["[x].jsonl", "a.jsonl", "b.jsonl", "sub/c.jsonl.gz", "sub/d.jsonl.zst"]
READ_IN_FOLDERS = [*JSON_LINES, "sub/p.parquet"]
FILES = [*READ_IN_FOLDERS[::-1], "e.json", "f.json.gz", "notes.txt", "README.md", ".hidden.jsonl"]


@pytest.fixture
def folder(tmp_path):
    for name in [*FILES, ".cache/g.jsonl"]:
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "texts"


def find(*inputs: object, **domains: Any) -> list[Source]:
    """The sources of ``inputs``; with keywords, domains are asked for."""
    options: dict[str, Any] = {
        name: (tuple(value),) if isinstance(value, list) else value
        for name, value in domains.items()
    }
    source = SourceOptions((tuple(str(text) for text in inputs),))
    return find_sources(source, DomainOptions(**options) if domains else None)


def names(folder, found):
    return [(str(Path(source.path).relative_to(folder)), source.domain) for source in found]


def test_a_folder_is_searched_at_any_depth_but_not_for_what_is_hidden(folder):
    assert names(folder, find(f"x={folder}")) == [(name, "x") for name in READ_IN_FOLDERS]


def test_linked_folders_are_searched_and_circles_end(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "far.jsonl").touch()
    (folder / "link").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    found = [name for name, _ in names(folder, find(folder))]
    assert found == sorted([*READ_IN_FOLDERS, "link/far.jsonl"])


@pytest.mark.parametrize("name", ["validation/a.jsonl", "set-test-00000.parquet"])
def test_a_folder_that_holds_splits_is_called_out(tmp_path, name):
    for path in (tmp_path / "train-00000.jsonl", tmp_path / name):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with pytest.warns(UserWarning, match=f"train and (validation|test).*hf:{tmp_path}"):
        assert len(find(tmp_path)) == 2


def test_a_name_that_exists_is_no_pattern(folder):
    assert names(folder, find(f"{folder}/[x].jsonl")) == [("[x].jsonl", None)]


def test_a_file_named_twice_is_read_once_per_domain_under_different_names(folder):
    path = f"{folder}/a.jsonl"
    found = find(f"x={path}", f"x={folder}/a*.jsonl", f"y={path}", path, f"{folder}/b.jsonl")
    assert [(source.name, source.domain) for source in found] == [
        (f"x={path}", "x"),
        (f"y={path}", "y"),
        (f"={path}", None),
        (f"{folder}/b.jsonl", None),
    ]


def test_an_equals_sign_after_a_slash_belongs_to_the_path(tmp_path):
    path = tmp_path / "lang=en" / "a.jsonl"
    path.parent.mkdir()
    path.touch()
    assert [(source.path, source.domain) for source in find(path)] == [(str(path), None)]
    assert [(source.path, source.domain) for source in find(f"english={path}")] == [
        (str(path), "english")
    ]


def test_a_source_says_how_it_is_read_and_what_it_was(folder):
    (folder / "a.jsonl").write_bytes(b"12345")
    found = {Path(source.path).name: source for source in find(folder, f"{folder}/f.json.gz")}
    assert {name: (source.kind, source.cuttable) for name, source in found.items()} == {
        "[x].jsonl": ("lines", True),
        "a.jsonl": ("lines", True),
        "b.jsonl": ("lines", True),
        "c.jsonl.gz": ("lines", False),
        "d.jsonl.zst": ("lines", False),
        "p.parquet": ("parquet", True),
        "f.json.gz": ("lines", False),
    }
    assert found["a.jsonl"].bytes == 5
    assert found["a.jsonl"].modified_ns == (folder / "a.jsonl").stat().st_mtime_ns
    assert Source(**dataclasses.asdict(found["a.jsonl"])) == found["a.jsonl"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "--input is empty"),
        (["x={folder}/absent.jsonl"], "no such file"),
        (["x={folder}/*.csv"], "no such file"),
        (["x={folder}/notes.txt"], "unsupported format"),
        (["x={folder}/empty"], "no file of a supported format"),
        (["x={folder}/sub/c.parquet.gz"], "unsupported format"),
        (["x={folder}/dangling.jsonl"], "cannot read .*dangling.jsonl: No such file"),
        (["={folder}/a.jsonl"], "NAME=PATH"),
        (["x="], "NAME=PATH"),
        (["n" * (MAX_DOMAIN_BYTES + 1) + "={folder}/a.jsonl"], "NAME of at most"),
    ],
)
def test_inputs_that_lead_to_nothing_are_refused(folder, given, problem):
    (folder / "empty").mkdir()
    (folder / "sub/c.parquet.gz").touch()
    (folder / "dangling.jsonl").symlink_to(folder / "absent")
    with pytest.raises(UserError, match=problem):
        find(*(text.replace("{folder}", str(folder)) for text in given))


@contextlib.contextmanager
def as_somebody_else():
    """The superuser may read everything; for a moment be nobody in particular."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_may_not_be_read_is_told(monkeypatch):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "locked").mkdir()
        (folder / "locked/a.jsonl").touch()
        (folder / "b.jsonl").write_bytes(b'{"text": "b"}\n')
        (folder / "b.jsonl").chmod(0)
        (folder / "locked").chmod(0)
        options = SourceOptions(((f"{folder}/b.jsonl",),))
        sources = find_sources(options)
        with as_somebody_else():
            with pytest.raises(UserError, match=r"cannot read .*/b.jsonl: Permission denied"):
                list(DocumentReader(options, sources).read(Piece(0)))
            with pytest.raises(UserError, match=r"cannot read the folder .*/locked: Permission"):
                find(folder)
        (folder / "locked").chmod(0o755)


def test_domains_are_told_by_paths(folder):
    found = find(folder, domain_from_path=r"/([^/]*)\.(?:jsonl|parquet)")
    assert names(folder, found) == [
        ("[x].jsonl", "[x]"),
        ("a.jsonl", "a"),
        ("b.jsonl", "b"),
        ("sub/c.jsonl.gz", "c"),
        ("sub/d.jsonl.zst", "d"),
        ("sub/p.parquet", "p"),
    ]


def test_domains_of_paths_are_renamed_or_left_out_but_not_those_that_are_given(folder):
    with pytest.warns(UserWarning, match=r"leaves out 1 files, of '\[x\]'"):
        found = find(
            f"a={folder}/b.jsonl",
            folder / "a.jsonl",
            folder / "sub",
            folder / "[x].jsonl",
            domain_from_path=r"/([^/]*)\.(?:jsonl|parquet)",
            rename_domain=["c=one", "d=one", "p=p", "*=", "a=other"],
        )
    assert names(folder, found) == [
        ("b.jsonl", "a"),
        ("a.jsonl", "other"),
        ("sub/c.jsonl.gz", "one"),
        ("sub/d.jsonl.zst", "one"),
        ("sub/p.parquet", "p"),
    ]


@pytest.mark.filterwarnings("ignore:--rename-domain leaves out")
@pytest.mark.parametrize(
    ("given", "options", "problem"),
    [
        (["{f}/a.jsonl"], {"domain_key": None}, "of which domain.*--domain-key"),
        (["{f}/a.jsonl"], {"domain_from_config": True}, "of which domain"),
        (["x={f}/a.jsonl"], {"domain_key": "set"}, "--domain-key has no effect"),
        (["x={f}/a.jsonl"], {"domain_from_path": "(a)"}, "--domain-from-path has no effect"),
        (["{f}/a.jsonl"], {"domain_from_path": "/no/(.*)"}, "a.jsonl: .* finds no domain"),
        (["{f}/a.jsonl"], {"domain_from_path": "(z*)a.jsonl"}, "finds no domain"),
        (
            ["{f}/a.jsonl"],
            {"domain_from_path": "(a).jsonl", "rename_domain": ["a="]},
            "leaves out all",
        ),
    ],
)
def test_options_that_contradict_each_other_or_mean_nothing_are_refused(
    folder, given, options, problem
):
    with pytest.raises(UserError, match=problem) as told:
        find(*(text.replace("{f}", str(folder)) for text in given), **options)
    assert "\n" not in str(told.value)


def splits_of(found):
    return [(Path(source.path).stem, source.domain, source.split) for source in found]


def test_a_domain_with_valid_and_test_of_its_own_is_for_training_else(folder):
    found = find(
        f"x={folder}/a.jsonl",
        f"y={folder}/a.jsonl",
        valid_input=[f"x={folder}/b.jsonl", f"y={folder}/b.jsonl"],
        test_input=[f"x={folder}/e.json"],
    )
    assert splits_of(found) == [
        ("a", "x", "train"),
        ("a", "y", None),
        ("b", "x", "valid"),
        ("b", "y", "valid"),
        ("e", "x", "test"),
    ]


def test_of_domains_told_by_a_key_that_is_assumed_of_all(folder):
    found = find(
        folder / "a.jsonl",
        domain_key="set",
        valid_input=[f"{folder}/b.jsonl"],
        test_input=[f"{folder}/sub/c.jsonl.gz"],
    )
    assert [source.split for source in found] == ["train", "valid", "test"]


def test_a_file_for_two_splits_is_refused(folder):
    path = f"x={folder}/a.jsonl"
    with pytest.raises(UserError, match=r"a\.jsonl is given for valid and for test"):
        find(f"x={folder}/b.jsonl", valid_input=[path], test_input=[path])
    with pytest.raises(UserError, match=r"a\.jsonl is given for no split and for valid"):
        find(path, valid_input=[path])


NOT_REGULAR = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/ptmx"),
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
}


@pytest.mark.parametrize("make", NOT_REGULAR.values(), ids=NOT_REGULAR)
@pytest.mark.parametrize("name", ["s.jsonl", "s.jsonl.gz", "s.parquet"])
def test_what_may_never_end_is_rejected_by_name_and_in_folders(folder, monkeypatch, make, name):
    monkeypatch.chdir(folder)  # the path of a socket is short
    make(Path(name))
    for given in (folder / name, folder, folder / "s.*"):
        with pytest.raises(UserError, match=rf"{name}: not a regular file"):
            find(f"x={given}")
