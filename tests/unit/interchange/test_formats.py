from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from megatron_chameleon.artifacts import SPLITS, MixtureWarning
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange import (
    APPLIES_TO,
    FORMATS,
    ExportFormat,
    ExportOptions,
    export_mixture,
)

TOOL = Path(__file__).resolve().parents[3] / "tools" / "export_mixture.py"


def run_main(monkeypatch, *arguments):
    """Exit status of the tool, run in this process."""
    monkeypatch.setattr(sys, "argv", [str(TOOL), *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(TOOL), run_name="__main__")
    return left.value.code


VALUES = {"split": "valid", "token_budget": 10**9}


@pytest.mark.parametrize("chosen", get_args(ExportFormat))
def test_an_option_changes_what_is_written_or_is_rejected(export, chosen):
    for name, value in VALUES.items():
        if chosen in APPLIES_TO[name]:
            assert export(chosen, **{name: value}) != export(chosen)
        else:
            with pytest.raises(UserError, match=f"does nothing for --format {chosen}"):
                export(chosen, **{name: value})


def test_a_budget_of_no_tokens_is_rejected(export):
    with pytest.raises(UserError, match="--token-budget 0"):
        export("olmo-core", token_budget=0)


def test_the_tables_have_every_domain_with_its_exact_weight(export, corpus, weights):
    rows = list(csv.DictReader(io.StringIO(export("csv"))))
    assert {row["domain"]: float(row["weight"]) for row in rows} == weights
    listed = json.loads(export("json"))
    assert {row["domain"]: row["weight"] for row in listed} == weights
    for row, from_json in zip(rows, listed, strict=True):
        assert row == {key: str(value) for key, value in from_json.items()}
        for split in SPLITS:
            assert Path(row[f"{split}_prefix"]) == corpus.prefix(row["domain"], split)
            tokens = corpus.domains[row["domain"]].split(split).tokens
            assert int(row[f"{split}_tokens"]) == tokens


def test_paths_are_absolute_where_the_corpus_was_given_by_a_relative_one(
    export, corpus, monkeypatch
):
    monkeypatch.chdir(corpus.root.parent)
    absolute = export("megatron-data-path")
    assert export("megatron-data-path", corpus=Path(corpus.root.name)) == absolute
    assert all(os.path.isabs(word) for word in absolute.split()[1::2])


def test_a_weight_for_a_domain_that_the_corpus_lacks_is_refused(export, tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"weights": {"law": 1.0}}')
    with pytest.raises(UserError, match="'law', which is not a domain of"):
        export("json", mixture=other)


def test_a_domain_that_the_mixture_does_not_name_has_weight_0(export, tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"weights": {"code": 1.0}}')
    with pytest.warns(MixtureWarning, match="news"):
        rows = json.loads(export("json", mixture=other))
    assert [row["weight"] for row in rows] == [0, 1, 0, 0]


def test_the_tool_prints_or_writes_the_same_text(
    export, corpus, mixture_file, tmp_path, monkeypatch, capsys
):
    given = ["--mixture", mixture_file, "--corpus", corpus.root, "--format", "megatron-data-args"]
    assert run_main(monkeypatch, *given) == 0
    assert capsys.readouterr().out == export("megatron-data-args")
    written = tmp_path / "new" / "blend.txt"
    assert run_main(monkeypatch, *given, "--output", written) == 0
    assert written.read_text() == export("megatron-data-args")
    assert str(written) in capsys.readouterr().out


def test_the_tool_needs_neither_torch_nor_megatron(corpus, mixture_file):
    given = ["--mixture", mixture_file, "--corpus", corpus.root, "--format", "csv"]
    script = (
        "import runpy, sys\n"
        "try:\n"
        f"    runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
        "finally:\n"
        "    assert not {'torch', 'megatron.core'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", script, *map(str, given)]
    subprocess.run(command, check=True, cwd=TOOL.parents[1], capture_output=True, timeout=100)


def test_an_unknown_format_is_refused_with_the_known_ones(
    corpus, mixture_file, monkeypatch, capsys
):
    given = ["--mixture", mixture_file, "--corpus", corpus.root, "--format", "levanter"]
    assert run_main(monkeypatch, *given) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "levanter" in told
    assert all(name in told for name in FORMATS)


def test_a_folder_that_cannot_be_written_is_told_in_one_line(
    corpus, mixture_file, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("")
    given = ["--mixture", mixture_file, "--corpus", corpus.root, "--format", "csv"]
    for output in (tmp_path / "file" / "blend.csv", tmp_path):
        assert run_main(monkeypatch, *given, "--output", output) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ")
        assert str(output) in told
        assert told.count("\n") == 1


def test_the_mixture_itself_is_not_overwritten(corpus, mixture_file):
    before = mixture_file.read_bytes()
    with pytest.raises(UserError, match="is the mixture itself"):
        export_mixture(ExportOptions(mixture_file, corpus.root, "json", output=mixture_file))
    assert mixture_file.read_bytes() == before


def test_a_file_is_replaced_only_if_asked_for(corpus, mixture_file, tmp_path):
    output = tmp_path / "out.json"
    output.write_text("of other origin")
    options = ExportOptions(mixture_file, corpus.root, "json", output=output)
    with pytest.raises(UserError, match="--overwrite"):
        export_mixture(options)
    assert output.read_text() == "of other origin"
    export_mixture(dataclasses.replace(options, overwrite=True))
    assert json.loads(output.read_text())


def test_a_path_that_is_not_utf_8_is_refused(export, corpus, tmp_path):
    moved = tmp_path / os.fsdecode(b"caf\xe9")
    moved.symlink_to(corpus.root)
    with pytest.raises(UserError, match="not UTF-8"):
        export("csv", corpus=moved)
