"""tools/convert_mixture.py: options, files, and all formats except Megatron's."""

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
import yaml

from megatron_chameleon.artifacts import SPLITS, Mixture
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange import ConvertOptions, FormatName, convert_mixture
from megatron_chameleon.interchange.options import LIMITED, ONE_SPLIT
from tests.small_corpus import write_small_corpus

VALUES = {"split": "valid", "token_budget": 10**9}
APPLIES_TO = {"split": ONE_SPLIT, "token_budget": LIMITED}


@pytest.mark.parametrize("chosen", get_args(FormatName))
def test_option_changes_the_export_or_is_rejected(export, chosen):
    for name, value in VALUES.items():
        if chosen in APPLIES_TO[name]:
            assert export(chosen, **{name: value}) != export(chosen)
        else:
            with pytest.raises(UserError, match="applies only to --format"):
                export(chosen, **{name: value})


def test_table_and_mixture_have_every_domain_with_its_exact_weight(
    export, corpus, weights, tmp_path
):
    rows = list(csv.DictReader(io.StringIO(export("csv"))))
    assert {row["domain"]: float(row["weight"]) for row in rows} == weights
    (tmp_path / "mixture.json").write_text(export("json"))
    mixture = Mixture.load(tmp_path / "mixture.json")
    assert mixture.weights == weights
    assert mixture.sources is not None
    for row in rows:
        for split in SPLITS:
            prefix = corpus.prefix(row["domain"], split)
            assert Path(row[f"{split}_prefix"]) == prefix
            assert mixture.sources[row["domain"]].files[split] == [f"{prefix}.bin"]
            tokens = corpus.domains[row["domain"]].split(split).tokens
            assert int(row[f"{split}_tokens"]) == tokens


def test_paths_are_absolute(export, corpus, monkeypatch):
    monkeypatch.chdir(corpus.root.parent)
    absolute = export("megatron-data-path")
    assert export("megatron-data-path", corpus=Path(corpus.root.name)) == absolute
    assert all(os.path.isabs(word) for word in absolute.split()[1::2])


def test_existing_files_are_replaced_only_with_overwrite(export, corpus, mixture_file, tmp_path):
    with pytest.raises(UserError, match="is the mixture itself"):
        ConvertOptions(format="csv", mixture=mixture_file, output=mixture_file, overwrite=True)
    output = tmp_path / "new" / "out.json"
    options = ConvertOptions(format="csv", mixture=mixture_file, corpus=corpus.root, output=output)
    convert_mixture(options)
    assert output.read_text() == export("csv")
    output.write_text("user data")
    with pytest.raises(UserError, match="--overwrite"):
        convert_mixture(options)
    assert output.read_text() == "user data"
    convert_mixture(dataclasses.replace(options, overwrite=True))
    assert output.read_text() == export("csv")
    for invalid in (output / "blend.csv", tmp_path):
        with pytest.raises(UserError, match=re.escape(str(invalid))):
            convert_mixture(dataclasses.replace(options, output=invalid, overwrite=True))


def test_torchtitan_and_litgpt_get_names_and_weights(export, sampled, tmp_path):
    loaded = json.loads(export("litgpt"))
    assert dict(zip(loaded["datasets"], loaded["weights"], strict=True)) == sampled
    assert loaded["iterate_over_all"] is False
    loaded = json.loads(export("torchtitan"))
    assert {source["dataset"]: source["weight"] for source in loaded["sources"]} == sampled
    write_small_corpus(tmp_path / "corpus", ["Code", "code"])
    mixture = tmp_path / "mixture.json"
    mixture.write_text('{"weights": {"Code": 0.5, "code": 0.5}}')
    with pytest.raises(UserError, match="'Code' and 'code'"):  # torchtitan ignores case
        export("torchtitan", corpus=tmp_path / "corpus", mixture=mixture)


def test_olmo_core_gets_token_files_and_may_repeat_text_within_the_token_budget(
    export, corpus, sampled, mixture_file, tmp_path
):
    for split in ("train", "test"):
        sources = yaml.safe_load(export("olmo-core", split=split))["sources"]
        assert {source["source_name"]: source["target_ratio"] for source in sources} == sampled
        for source in sources:
            assert source["paths"] == [f"{corpus.prefix(source['source_name'], split)}.bin"]
            assert "max_repetition_ratio" not in source
    tokens = corpus.train_tokens
    budget = round(2.5 * tokens["news"] / sampled["news"])
    sources = yaml.safe_load(export("olmo-core", token_budget=budget))["sources"]
    allowed = {source["source_name"]: source["max_repetition_ratio"] for source in sources}
    assert allowed["news"] == 3
    for name, ratio in allowed.items():
        assert max(1, budget * sampled[name] / tokens[name]) <= ratio
    # The default is the budget that the mixture was computed for.
    computed = tmp_path / "computed.json"
    computed.write_text(json.dumps(json.loads(mixture_file.read_text()) | {"token_budget": budget}))
    assert yaml.safe_load(export("olmo-core", mixture=computed))["sources"] == sources
    moved = shutil.copytree(corpus.root, tmp_path / "a*b")
    with pytest.raises(UserError, match="reads '\\*' as a pattern"):
        export("olmo-core", corpus=moved)
