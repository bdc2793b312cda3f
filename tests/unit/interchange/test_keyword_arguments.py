"""The exports that hold arguments for a reader of another package; test_readers.py runs those."""

from __future__ import annotations

import json
import shutil

import pytest

from megatron_chameleon.errors import UserError
from tests.small_corpus import write_small_corpus


def test_torchtitan_gets_names_in_lower_case_and_weights(export, drawn):
    loaded = json.loads(export("torchtitan"))
    assert list(loaded) == ["sources"]
    assert {source["dataset"]: source["weight"] for source in loaded["sources"]} == drawn


def test_names_that_torchtitan_cannot_tell_apart_are_refused(export, tmp_path):
    write_small_corpus(tmp_path / "corpus", ["Code", "code"])
    mixture = tmp_path / "mixture.json"
    mixture.write_text('{"weights": {"Code": 0.5, "code": 0.5}}')
    with pytest.raises(UserError, match="'Code' and 'code' are the same name"):
        export("torchtitan", corpus=tmp_path / "corpus", mixture=mixture)
    mixture.write_text('{"weights": {"Code": 1.0, "code": 0.0}}')
    loaded = json.loads(export("torchtitan", corpus=tmp_path / "corpus", mixture=mixture))
    assert loaded == {"sources": [{"dataset": "code", "weight": 1.0}]}


def test_litgpt_gets_names_and_weights_in_the_same_order(export, drawn):
    loaded = json.loads(export("litgpt"))
    assert dict(zip(loaded["datasets"], loaded["weights"], strict=True)) == drawn
    assert loaded["iterate_over_all"] is False


@pytest.mark.parametrize("split", ["train", "test"])
def test_olmo_core_gets_the_token_files_of_the_split(export, corpus, drawn, split):
    sources = json.loads(export("olmo-core", split=split))["sources"]
    assert {source["source_name"]: source["target_ratio"] for source in sources} == drawn
    for source in sources:
        assert source["paths"] == [f"{corpus.prefix(source['source_name'], split)}.bin"]
        assert "max_repetition_ratio" not in source


def test_olmo_core_is_allowed_the_repeats_that_a_budget_asks_for(
    export, corpus, drawn, mixture_file, tmp_path
):
    tokens = corpus.train_tokens
    budget = round(2.5 * tokens["news"] / drawn["news"])
    sources = json.loads(export("olmo-core", token_budget=budget))["sources"]
    allowed = {source["source_name"]: source["max_repetition_ratio"] for source in sources}
    assert allowed["news"] == 3
    for name, ratio in allowed.items():
        assert max(1, budget * drawn[name] / tokens[name]) <= ratio
    # The budget that a mixture was computed for counts without being given again.
    computed = tmp_path / "computed.json"
    described = json.loads(mixture_file.read_text()) | {"token_budget": budget}
    computed.write_text(json.dumps(described))
    assert json.loads(export("olmo-core", mixture=computed))["sources"] == sources
    for source in json.loads(export("olmo-core", token_budget=1))["sources"]:
        assert source["max_repetition_ratio"] == 1


def test_a_path_that_olmo_core_takes_for_a_pattern_is_refused(export, corpus, tmp_path):
    moved = shutil.copytree(corpus.root, tmp_path / "a*b")
    with pytest.raises(UserError, match="reads '\\*' as a pattern"):
        export("olmo-core", corpus=moved)
