"""A run folder with everything that a report's page has a section for, which only tests read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import (
    Clusters,
    Corpus,
    Cost,
    DomainLoss,
    EmbeddingStore,
    EvaluationResult,
    Mixture,
    SampledTokens,
    TrainingRun,
)
from tests.unit.report.downstream_samples import PROTOCOL, downstream
from tests.unit.report.report_samples import (
    random_weights,
    write_run_folder,
    write_sweep,
)

# What a careless page would run, break at, or show as something else.
HOSTILE_NAMES = [
    "</script><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "</title><svg onload=alert(1)>",
    "$x^2$ & {y}",
    "=cmd|' /C calc'!A0",
    "שלום abc",
    "日本語",
    "a|b `c` [d](javascript:alert(1))",
    "\x1b[31mred\u202eevil",
]
RUNS = ("uniform-seed1", "chameleon-pretrain-seed1")
TASKS = ("arc_easy", "piqa", "winogrande")
ZERO_SHOT = dataclasses.replace(PROTOCOL, shots=[0])


def write_full_folder(root: Path, names: list[str], seed: int = 0, windows: int = 12) -> Path:
    """A run folder with everything.

    That is sampled tokens, bytes and documents of held-out text, tasks, a sweep, and ``windows`` of
    each domain.
    """
    write_run_folder(root, names, seed)
    rng = np.random.default_rng(seed)
    corpus = Corpus.load(root / "1-corpus")
    difficulty = {name: rng.normal(0, 0.3, 12) for name in names}
    for name in RUNS:
        run = TrainingRun.load(root / "5-base" / name)
        tokens = {
            domain: SampledTokens(weight, weight * run.tokens, round(weight * run.tokens), 1.5)
            for domain, weight in run.mixture.items()
        }
        dataclasses.replace(run, domain_tokens=tokens).save()
        path = root / "6-evaluation" / f"{name}.json"
        result = EvaluationResult.load(path)
        domains = {
            domain: _by_document(loss.loss + difficulty[domain], loss.unigram_loss)
            for domain, loss in result.domains.items()
        }
        dataclasses.replace(result, domains=domains, corpus_hash=corpus.hash).save(path)
        accuracies = {task: {0: float(rng.random())} for task in TASKS}
        answers = downstream(accuracies, protocol=ZERO_SHOT, checkpoint_hash=name)
        answers.save(root / "6-evaluation" / f"{name}-downstream.json")
    Mixture(random_weights(names, rng), "doremi", cost=Cost(9e12, 40.0, 20.0, 2)).save(
        root / "4-mixture/doremi.json"
    )
    store = EmbeddingStore.load(root / "3-embeddings")
    for name in names:
        vectors = rng.normal(size=store.hidden_size) + 0.4 * rng.normal(size=(windows, 8))
        store = store.with_domain(name, vectors.astype(np.float32), "1", Cost())
    centre = Mixture.load(root / "4-mixture/chameleon-pretrain.json")
    others = [
        dataclasses.replace(centre, weights=_moved(centre.weights, rng, size))
        for size in (0.02, 0.1)
    ]
    write_sweep(root, {"ridge": [centre, *others], "num_windows": [centre, others[1]]})
    return root


def _by_document(losses: np.ndarray, unigram_loss: float) -> DomainLoss:
    tokens = np.full(len(losses), 50)
    clusters = Clusters((losses * tokens).tolist(), tokens.tolist(), (4 * tokens).tolist())
    total = int(tokens.sum())
    return DomainLoss(float(losses.mean()), total, unigram_loss, 4 * total, clusters)


def _moved(weights: dict[str, float], rng: np.random.Generator, size: float) -> dict[str, float]:
    moved = {name: w * float(np.exp(rng.normal(0, size))) for name, w in weights.items()}
    return {name: w / sum(moved.values()) for name, w in moved.items()}
