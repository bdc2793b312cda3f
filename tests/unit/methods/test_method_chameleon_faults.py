"""Chameleon where something is wrong: options, text, proxy, store."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import (
    Corpus,
    find_checkpoint,
)
from megatron_chameleon.artifacts.corpus import index_file_bytes
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.leverage.plan import plan_mixture
from megatron_chameleon.options.mixture import ExtractionOptions, RecipeOptions
from megatron_chameleon.options.parallel import ParallelOptions
from tests.small_corpus import write_small_corpus
from tests.unit.methods.chameleon_runs import (
    compute,
    options,
    store_beside,
)
from tests.unit.poison import poison_checkpoint

__all__ = ["compute", "options"]  # fixtures


MISTAKES = [
    ({"weighting": RecipeOptions(ridge=-1.0)}, "--ridge -1.0: "),
    ({"weighting": RecipeOptions(ridge=float("nan"))}, "--ridge nan: "),
    ({"weighting": RecipeOptions(temperature=0.0)}, "--temperature 0.0: "),
    (
        {"weighting": RecipeOptions("scaled", normalize=False)},
        "--recipe scaled and its knobs: .* needs normalize",
    ),
    ({"weighting": RecipeOptions(bootstrap_resamples=1)}, "--bootstrap-resamples 1: "),
    ({"weighting": RecipeOptions(confidence=1.0)}, "--confidence 1.0: "),
    ({"extraction": ExtractionOptions(layer=99)}, "--layer 99: the model has layers 1 to 4; "),
    ({"extraction": ExtractionOptions(layer=0)}, "--layer 0: the model has layers 1 to 4"),
    ({"extraction": ExtractionOptions(window_length=33)}, "--window-length 33: .* 1 to 32 tokens"),
    ({"extraction": ExtractionOptions(num_windows=0)}, "--num-windows 0: "),
    ({"extraction": ExtractionOptions(embedding_batch_size=0)}, "--embedding-batch-size 0: "),
    ({"extraction": ExtractionOptions(extraction_seed=-1)}, "--extraction-seed -1: "),
    ({"weighting": RecipeOptions(precision=0.0)}, "--precision 0.0: "),
    ({"token_budget": 0}, "--token-budget 0: "),
    ({"max_epochs": 4.0}, "--max-epochs limits the epochs of a --token-budget: give that too"),
    ({"max_epochs": 0.0, "token_budget": 9}, "--max-epochs 0.0: "),
    (
        {"max_epochs": 2.0, "token_budget": 10**9},
        "--max-epochs 2: .* 1,000,000,000;",
    ),
    ({"domains": "news,prose"}, "--domains news,prose: there is no domain 'prose'; those of"),
    ({"domains": " , "}, "--domains  , : it names no domain; those of"),
    ({"keep": Path("nowhere.json")}, r"nowhere\.json does not exist"),
    ({"checkpoint": Path("nowhere")}, "--checkpoint nowhere: neither a checkpoint nor a run"),
    ({"corpus": Path("nowhere")}, r"nowhere/corpus\.json does not exist; tools/preprocess_data"),
    ({"parallel": ParallelOptions(3)}, r"1 rank\(s\) cannot be laid out as tensor 3"),
    ({"parallel": ParallelOptions(2)}, r"1 rank\(s\) cannot be laid out as tensor 2"),
]


@pytest.mark.parametrize(("changes", "problem"), MISTAKES)
def test_a_mistake_has_one_clear_line_and_writes_nothing(compute, tmp_path, changes, problem):
    with pytest.raises(UserError, match=problem) as refused:
        compute(**changes)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_another_tokenizer_is_refused(compute, tmp_path):
    other = write_small_corpus(tmp_path / "other", tokenizer_hash="9" * 64)
    with pytest.raises(UserError, match=r"trained with another tokenizer than .*--tokenizer-model"):
        compute(corpus=other.root)


def test_a_domain_without_training_text_is_refused(compute, tmp_path):
    corpus = write_small_corpus(tmp_path / "corpus")
    prefix = corpus.prefix("code", "train")
    Path(f"{prefix}.bin").write_bytes(b"")
    Path(f"{prefix}.idx").write_bytes(bytes(index_file_bytes(0)))
    domain = corpus.domains["code"]
    empty = dataclasses.replace(domain.train, documents=0, tokens=0, block_checksums=None)
    domains = {**corpus.domains, "code": dataclasses.replace(domain, train=empty)}
    dataclasses.replace(corpus, domains=domains).save()
    Corpus.load(corpus.root)
    with pytest.raises(UserError, match=r"domain 'code' of .* has no training tokens to embed"):
        compute(corpus=corpus.root)


def test_a_proxy_that_has_diverged_is_told_and_leaves_no_mixture(compute, trained_run, tmp_path):
    poison_checkpoint(find_checkpoint(trained_run), "decoder.layers.1.mlp.linear_fc2.bias")
    with pytest.raises(UserError, match=r"hidden states after layer 2 are not finite in 60 of 60"):
        compute(checkpoint=trained_run)
    assert not (tmp_path / "out").exists()
    # What lies before the ruined layer can still be used.
    weights = compute(checkpoint=trained_run, extraction=ExtractionOptions(layer=1)).weights
    assert all(weight > 0 for weight in weights.values())


def test_a_damaged_store_says_what_to_delete(compute, options):
    compute()
    store = store_beside(options)
    damaged = store.root / store.domains["code"].file
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1])
    with pytest.raises(UserError, match=rf"cannot read {damaged} .*; delete it and run again"):
        compute()
    damaged.unlink()
    compute()
    assert damaged.read_bytes() == content


def test_planning_reads_and_writes_nothing(options, tmp_path):
    plan = plan_mixture(options())
    assert plan.store == options().output.parent / "embeddings"
    assert plan.embedding.layer == 2
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_strict_json(compute, options):
    compute(weighting=RecipeOptions("reference", bootstrap_resamples=2))  # no ceiling: infinite
    text = options().output.read_text()
    body = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert body["parameters"]["recipe"]["score_ceiling"] is None
