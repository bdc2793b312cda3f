"""DoGE on text of which it is known what can be learnt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import (
    SPLITS,
    Corpus,
    Cost,
    Domain,
    DomainSplit,
    Mixture,
    Split,
    TokenizerIdentity,
    provenance,
)
from megatron_chameleon.corpus.indexed import IndexedWriter
from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions
from megatron_chameleon.methods.gradient_alignment.compute import compute_doge
from megatron_chameleon.options.doge import DogeRule
from megatron_chameleon.options.training import OptimizerOptions
from tests.small_corpus import EOD, TOKENIZER_HASH, VOCAB_SIZE
from tests.unit.methods.test_method_doge import doge_options

LENGTH, DOCUMENTS = 400, {"train": 40, "valid": 2, "test": 2}


def ring(rng, first):
    """A walk around 20 tokens, from ``first`` on, from anywhere on it."""
    return first + (rng.integers(20) + np.arange(LENGTH)) % 20


TEXTS = {
    "walk": lambda rng: ring(rng, 0),
    "walk again": lambda rng: ring(rng, 0),
    "noise": lambda rng: rng.integers(0, EOD, LENGTH),
}


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> Corpus:
    """A corpus of a text that can be learnt, the same once more, and one that cannot."""
    root, rng = tmp_path_factory.mktemp("known"), np.random.default_rng(0)

    def write(name, split: Split) -> DomainSplit:
        prefix = root / split / name
        prefix.parent.mkdir(parents=True, exist_ok=True)
        writer = IndexedWriter(prefix, "uint16")
        for _ in range(DOCUMENTS[split]):
            writer.add(np.append(TEXTS[name](rng), EOD))
        digest = writer.finish()
        return DomainSplit(
            f"{split}/{name}", writer.documents, writer.tokens, writer.tokens, digest
        )

    domains = {name: Domain(**{split: write(name, split) for split in SPLITS}) for name in TEXTS}
    made_by = provenance(PreprocessOptions(SourceOptions(()), root, Path("tokenizer.json")), {})
    identity = TokenizerIdentity("tokenizers", "tokenizer.json", TOKENIZER_HASH, VOCAB_SIZE, EOD)
    Corpus(root, identity, "uint16", domains, made_by, Cost()).save()
    return Corpus.load(root)


@pytest.fixture
def found(known, tmp_path):
    """``found(**changes)``: the mixture after 40 steps, while there is something to learn."""

    def mixture(**changes) -> Mixture:
        settings = {
            "train_iters": 40,
            "global_batch_size": 12,
            "micro_batch_size": 4,
            "save_interval": 100,
            "log_interval": 20,
            "optimizer": OptimizerOptions(lr=3e-3, min_lr=1e-3, lr_warmup_iters=2),
            "rule": DogeRule(doge_mu=0.05),
            **changes,
        }
        compute_doge(doge_options(known, tmp_path / "doge.json", **settings))
        return Mixture.load(tmp_path / "doge.json")

    return mixture


def test_noise_loses_and_a_text_that_is_there_twice_shares(found):
    weights = found().weights
    assert weights["walk"] == pytest.approx(weights["walk again"], rel=0.2)
    assert min(weights["walk"], weights["walk again"]) > 1.5 * weights["noise"]


def test_towards_a_text_the_one_like_it_wins(found):
    weights = found(target="walk again").weights
    assert weights["walk again"] == 0.0
    assert weights["walk"] > 2 * weights["noise"]
