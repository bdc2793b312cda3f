"""tools/export_mixture.py: all formats but those of Megatron."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import get_args

import pytest

from megatron_chameleon.artifacts import SPLITS, MixtureWarning
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange import (
    APPLIES_TO,
    ExportFormat,
    ExportOptions,
    export_mixture,
)
from tests.small_corpus import write_small_corpus

VALUES = {"split": "valid", "token_budget": 10**9}


@pytest.mark.parametrize("chosen", get_args(ExportFormat))
def test_option_changes_the_export_or_is_rejected(export, chosen):
    for name, value in VALUES.items():
        if chosen in APPLIES_TO[name]:
            assert export(chosen, **{name: value}) != export(chosen)
        else:
            with pytest.raises(UserError, match="applies only to --format"):
                export(chosen, **{name: value})


def test_tables_have_every_domain_with_its_exact_weight(export, corpus, weights):
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


def test_paths_are_absolute(export, corpus, monkeypatch):
    monkeypatch.chdir(corpus.root.parent)
    absolute = export("megatron-data-path")
    assert export("megatron-data-path", corpus=Path(corpus.root.name)) == absolute
    assert all(os.path.isabs(word) for word in absolute.split()[1::2])


def test_domain_without_a_weight_has_weight_0(export, tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"weights": {"code": 1.0}}')
    with pytest.warns(MixtureWarning, match="news"):
        rows = json.loads(export("json", mixture=other))
    assert [row["weight"] for row in rows] == [0, 1, 0, 0]


def test_tool_prints_or_writes_the_same_text(export, corpus, mixture_file, tmp_path, capsys):
    options = ExportOptions(mixture_file, corpus.root, "megatron-data-args")
    export_mixture(options)
    assert capsys.readouterr().out == export("megatron-data-args")
    output = tmp_path / "new" / "blend.txt"
    export_mixture(dataclasses.replace(options, output=output))
    assert output.read_text() == export("megatron-data-args")


def test_only_own_outputs_are_replaced(corpus, mixture_file, tmp_path):
    mixture_before = mixture_file.read_bytes()
    with pytest.raises(UserError, match="is the mixture itself"):
        ExportOptions(mixture_file, corpus.root, "json", output=mixture_file, overwrite=True)
    assert mixture_file.read_bytes() == mixture_before
    output = tmp_path / "out.json"
    output.write_text("user data")
    options = ExportOptions(mixture_file, corpus.root, "json", output=output)
    with pytest.raises(UserError, match="--overwrite"):
        export_mixture(options)
    assert output.read_text() == "user data"
    export_mixture(dataclasses.replace(options, overwrite=True))
    assert json.loads(output.read_text())
    for invalid in (output / "blend.csv", tmp_path):
        with pytest.raises(UserError, match=re.escape(str(invalid))):
            export_mixture(dataclasses.replace(options, output=invalid, overwrite=True))


def test_torchtitan_gets_weights_of_distinct_names(export, sampled, tmp_path):
    loaded = json.loads(export("torchtitan"))
    assert {source["dataset"]: source["weight"] for source in loaded["sources"]} == sampled
    write_small_corpus(tmp_path / "corpus", ["Code", "code"])
    mixture = tmp_path / "mixture.json"
    mixture.write_text('{"weights": {"Code": 0.5, "code": 0.5}}')
    with pytest.raises(UserError, match="'Code' and 'code'"):
        export("torchtitan", corpus=tmp_path / "corpus", mixture=mixture)
    mixture.write_text('{"weights": {"Code": 1.0, "code": 0.0}}')
    loaded = json.loads(export("torchtitan", corpus=tmp_path / "corpus", mixture=mixture))
    assert loaded == {"sources": [{"dataset": "code", "weight": 1.0}]}


def test_litgpt_gets_names_and_weights_in_the_same_order(export, sampled):
    loaded = json.loads(export("litgpt"))
    assert dict(zip(loaded["datasets"], loaded["weights"], strict=True)) == sampled
    assert loaded["iterate_over_all"] is False


@pytest.mark.parametrize("split", ["train", "test"])
def test_olmo_core_gets_the_token_files_of_the_split(export, corpus, sampled, split):
    sources = json.loads(export("olmo-core", split=split))["sources"]
    assert {source["source_name"]: source["target_ratio"] for source in sources} == sampled
    for source in sources:
        assert source["paths"] == [f"{corpus.prefix(source['source_name'], split)}.bin"]
        assert "max_repetition_ratio" not in source


def test_olmo_core_may_repeat_text_within_the_token_budget(
    export, corpus, sampled, mixture_file, tmp_path
):
    tokens = corpus.train_tokens
    budget = round(2.5 * tokens["news"] / sampled["news"])
    sources = json.loads(export("olmo-core", token_budget=budget))["sources"]
    allowed = {source["source_name"]: source["max_repetition_ratio"] for source in sources}
    assert allowed["news"] == 3
    for name, ratio in allowed.items():
        assert max(1, budget * sampled[name] / tokens[name]) <= ratio
    # The default is the budget that the mixture was computed for.
    computed = tmp_path / "computed.json"
    described = json.loads(mixture_file.read_text()) | {"token_budget": budget}
    computed.write_text(json.dumps(described))
    assert json.loads(export("olmo-core", mixture=computed))["sources"] == sources
    for source in json.loads(export("olmo-core", token_budget=1))["sources"]:
        assert source["max_repetition_ratio"] == 1


def test_path_that_olmo_core_reads_as_a_pattern_is_rejected(export, corpus, tmp_path):
    moved = shutil.copytree(corpus.root, tmp_path / "a*b")
    with pytest.raises(UserError, match="reads '\\*' as a pattern"):
        export("olmo-core", corpus=moved)
