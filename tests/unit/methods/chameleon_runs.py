"""Chameleon's options for a barely trained proxy, and mixtures of synthetic window vectors."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Corpus,
    Cost,
    Domain,
    DomainSplit,
    EmbeddingRecipe,
    EmbeddingStore,
    Mixture,
    TokenizerIdentity,
    find_checkpoint,
)
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.methods.chameleon.compute import compute_mixture
from megatron_chameleon.methods.chameleon.options import (
    ChameleonOptions,
    ExtractionOptions,
    RecipeOptions,
)
from megatron_chameleon.methods.chameleon.plan import MixturePlan
from megatron_chameleon.methods.chameleon.target import parse_target
from megatron_chameleon.methods.chameleon.weights import DomainWindows, read_windows, weigh
from megatron_chameleon.model.sizes import ModelShape, model_size
from tests.small_corpus import DOMAINS

WINDOWS, RESAMPLES = 60, 100
# Scores of a barely trained proxy are near zero with the reference's ridge.
SCALED = RecipeOptions(recipe="scaled", bootstrap_resamples=RESAMPLES)


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory):
    """An embedding store with the default windows, filled once; for reading only."""
    return tmp_path_factory.mktemp("shared") / "embeddings"


@pytest.fixture
def options(corpus, finished_run, shared_store, tmp_path):
    """``options(**changes)``: of the method, with the finished run as proxy."""

    def make(**changes):
        made = ChameleonOptions(
            corpus=corpus.root,
            checkpoint=finished_run,
            output=tmp_path / "out" / "mixture.json",
            store=shared_store,
            extraction=ExtractionOptions(num_windows=WINDOWS),
            weighting=SCALED,
        )
        return dataclasses.replace(made, **changes)

    return make


@pytest.fixture
def compute(options):
    """``compute(**changes)``: run the method and load its mixture."""

    def run(**changes):
        made = options(**changes)
        compute_mixture(made)
        return Mixture.load(made.output)

    return run


def means_of(folder, names=DOMAINS):
    store = EmbeddingStore.load(folder)
    return np.stack([store.vectors(name).astype(np.float64).mean(axis=0) for name in names])


PROVENANCE = Provenance([], {}, {}, {}, None, "2026-01-01")
RECIPE = EmbeddingRecipe("m" * 64, 2, 32, 64, seed=0, tokenizer_hash="t" * 64)


@dataclasses.dataclass(frozen=True)
class SyntheticMixture:
    mixture: Mixture
    windows: DomainWindows
    plan: MixturePlan


@pytest.fixture
def weigh_synthetic(finished_run, tmp_path):
    """``weigh_synthetic(k, **changes)``: the mixture of k domains with 64 random windows each."""

    def make(count, **changes):
        names = [f"domain-{number:04}" for number in range(count)]
        options = ChameleonOptions(
            corpus=finished_run,
            checkpoint=finished_run,
            output=tmp_path / "mixture.json",
            weighting=RecipeOptions("scaled", bootstrap_resamples=20),
            **changes,
        )
        windows = read_windows(_store(tmp_path / f"store-{count}", names), names, seed=0)
        plan = _plan(options, names, finished_run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of clipped scores
            return SyntheticMixture(weigh(plan, windows, None), windows, plan)

    return make


def _store(root: Path, names: Sequence[str], width: int = 12) -> EmbeddingStore:
    rng = np.random.default_rng(0)
    store = EmbeddingStore(root, RECIPE, width, {}, PROVENANCE, Cost())
    mean, domains = 3 * rng.normal(size=width), {}
    for name in names:
        center = mean + rng.normal(size=width)
        vectors = center + rng.standard_normal((RECIPE.num_windows, width), dtype=np.float32)
        written = store.with_domain(name, vectors.astype(np.float32), "hash", Cost())
        domains[name] = written.domains[name]
    return dataclasses.replace(store, domains=domains)


def _plan(options: ChameleonOptions, names: list[str], run: Path) -> MixturePlan:
    """The plan of domains of 1000 tokens each; ``run`` has a checkpoint."""
    split = DomainSplit("none", 10, 1000, 1000, "0" * 64)
    tokenizer = TokenizerIdentity("tokenizers", "tokenizer.json", "t" * 64, 251, 250)
    domains = {name: Domain(split, split, split) for name in names}
    return MixturePlan(
        options=options,
        corpus=Corpus(run, tokenizer, "uint16", domains, PROVENANCE, Cost()),
        names=names,
        kept=None,
        target=parse_target(options.target, options.target_strength, names),
        checkpoint=CheckpointRecord.load(find_checkpoint(run)),
        shape=ModelShape(model_size("nano"), 251, max_sequence_length=32),
        recipe=options.weighting.resolve(),
        embedding=RECIPE,
        store=run,
        provenance=PROVENANCE,
    )
