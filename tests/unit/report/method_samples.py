"""A run folder with several mixtures and seeds, of real artifacts with chosen contents."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import Cost, EmbeddingRecipe, EmbeddingStore, Mixture
from tests.unit.report.report_samples import (
    NAMES,
    PROVENANCE,
    evaluation,
    write_checkpoint,
    write_corpus,
    write_training_run,
)

SEEDS = (1, 2, 3)
WEIGHTS = {
    "uniform": [1 / 3, 1 / 3, 1 / 3],
    "unimax": [1 / 3, 1 / 3, 1 / 3],
    "chameleon": [0.5, 0.3, 0.2],
    "doremi": [0.1, 0.1, 0.8],
}
# Perplexity of each domain is this, times the domain's own factor, and a bit more by seed.
AVERAGES = {
    "uniform": [100.0, 104.0, 96.0],
    "chameleon": [90.0, 95.0, 86.0],
    "doremi": [120.0, 122.0, 118.0],
}
PROXY_COST, STORE_COST = Cost(1e12, 100.0, 100.0, 1), Cost(2e11, 20.0, 20.0, 1)
SHARES = (0.5, 1.0, 1.5)
OPTIONS = {"train_iters": 200, "optimizer": {"lr": 1e-2}}


def write_method_runs(root: Path) -> Path:
    """Uniform, UniMax (the same weights, no models), Chameleon and DoReMi, three seeds each."""
    corpus = write_corpus(root / "1-corpus", NAMES)
    digest = write_checkpoint(root / "2-proxy/nano-seed1/checkpoints/step-00000200", b"proxy")
    write_training_run(
        root / "2-proxy/nano-seed1",
        Mixture.uniform(NAMES).weights,
        "uniform",
        checkpoints=["checkpoints/step-00000200"],
        cost=PROXY_COST,
    )
    recipe = EmbeddingRecipe(digest, 1, 64, 16, 0, "0")
    EmbeddingStore(root / "3-embeddings/nano", recipe, 8, {}, PROVENANCE, STORE_COST).save()
    for name, weights in WEIGHTS.items():
        mixture = Mixture(
            weights=dict(zip(NAMES, weights, strict=True)),
            method=name,
            **{"provenance": PROVENANCE, **made_of(name, digest, recipe)},
        )
        mixture.save(root / f"4-mixture/{name}.json")
        for seed, average in zip(SEEDS, AVERAGES.get(name, ()), strict=False):
            write_base(root, f"{name}-seed{seed}", mixture, seed, average, corpus.hash)
    return root


def made_of(name: str, digest: str, recipe: EmbeddingRecipe) -> dict[str, Any]:
    """The fields of a mixture that say what it cost."""
    if name == "chameleon":
        inputs = dataclasses.replace(PROVENANCE, inputs={"checkpoint": digest})
        embedding = {"embedding": dataclasses.asdict(recipe)}
        return {"provenance": inputs, "parameters": embedding, "cost": Cost(0.0, 5.0, 5.0, 1)}
    if name == "doremi":
        return {"parameters": {"made_from": []}, "cost": Cost(6e12, 500.0, 500.0, 1)}
    return {}


def write_base(
    root: Path, name: str, mixture: Mixture, seed: int, average: float, corpus_hash: str
) -> None:
    """A finished run and its evaluation, with ``average`` as the mean of three perplexities."""
    made_by = dataclasses.replace(PROVENANCE, options={**OPTIONS, "seed": seed})
    checkpoint = root / "5-base" / name / "checkpoints/step-00000200"
    digest = write_checkpoint(checkpoint, name.encode())
    write_training_run(
        root / "5-base" / name,
        mixture.weights,
        mixture.method,
        provenance=made_by,
        checkpoints=["checkpoints/step-00000200"],
    )
    losses = [math.log(average * share) for share in SHARES]
    result = evaluation(NAMES, losses, corpus_hash=corpus_hash, step=200)
    result = dataclasses.replace(result, checkpoint=str(checkpoint), checkpoint_hash=digest)
    result.save(root / "6-evaluation" / f"{name}.json")
