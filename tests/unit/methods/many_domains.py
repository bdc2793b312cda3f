"""A plan and a store of many domains, made of numbers instead of text and a proxy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Corpus,
    Cost,
    Domain,
    DomainSplit,
    EmbeddingRecipe,
    EmbeddingStore,
    TokenizerIdentity,
    find_checkpoint,
)
from megatron_chameleon.artifacts.embedding_store import DomainEmbeddings
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.leverage.plan import MixturePlan, resolve_options
from megatron_chameleon.methods.leverage.target import resolve_target
from megatron_chameleon.model.sizes import ModelShape, model_size

MADE = Provenance([], {}, {}, {}, None, "2026-01-01")
RECIPE = EmbeddingRecipe("m" * 64, 2, 32, 64, seed=0, tokenizer_hash="t" * 64)


def made_store(
    root: Path, names: Sequence[str], num_windows: int, width: int, spread: float = 1.0
) -> EmbeddingStore:
    """A store in which windows scatter by ``spread`` around each domain's own center."""
    rng = np.random.default_rng(0)
    store = EmbeddingStore(root, RECIPE, width, {}, MADE, Cost())
    mean = 3 * rng.normal(size=width)
    entries = {}
    for name in names:
        center = mean + rng.normal(size=width)
        noise = rng.standard_normal((num_windows, width), dtype=np.float32)
        one = store.with_domain(name, (center + spread * noise).astype(np.float32), "c", Cost())
        entries[name] = one.domains[name]
    return with_entries(store, entries)


def with_entries(store: EmbeddingStore, entries: dict[str, DomainEmbeddings]) -> EmbeddingStore:
    return EmbeddingStore(store.root, RECIPE, store.hidden_size, entries, MADE, Cost())


def made_plan(options: ChameleonOptions, names: Sequence[str], run: Path) -> MixturePlan:
    """The plan of ``options`` for domains of 1000 tokens each; ``run`` has a checkpoint."""
    split = DomainSplit("none", 10, 1000, 1000, "0" * 64)
    tokenizer = TokenizerIdentity("tokenizers", "tokenizer.json", "t" * 64, 251, 250)
    domains = {name: Domain(split, split, split) for name in names}
    return MixturePlan(
        options=options,
        corpus=Corpus(run, tokenizer, "uint16", domains, MADE, Cost()),
        names=list(names),
        kept=None,
        target=resolve_target(options.target, options.target_strength, names),
        checkpoint=CheckpointRecord.load(find_checkpoint(run)),
        shape=ModelShape(model_size("nano"), 251, max_sequence_length=32),
        recipe=resolve_options(options.weighting),
        embedding=RECIPE,
        store=run,
        provenance=MADE,
    )
