"""Write run folders of artifacts with chosen or random contents."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron_chameleon.artifacts import (
    Clusters,
    Corpus,
    Cost,
    DomainLoss,
    EmbeddingRecipe,
    EmbeddingStore,
    EvaluationResult,
    Mixture,
    Protocol,
    Provenance,
    SampledTokens,
    SettingValue,
    Sweep,
    SweepPoint,
    TrainingRun,
)
from megatron_chameleon.artifacts.checkpoint import hash_files
from megatron_chameleon.artifacts.downstream_result import (
    DownstreamProtocol,
    DownstreamResult,
    Score,
    ShotScore,
    TaskScore,
)
from megatron_chameleon.artifacts.training_run import METRICS_NAME
from megatron_chameleon.report.tables import Table
from tests.unit.artifacts import artifact_samples

PROVENANCE = dataclasses.replace(artifact_samples.PROVENANCE, options={}, inputs={})
PROTOCOL = Protocol(split="test", window_length=64)
NAMES = ["code", "a|b_<x>", "prose"]
SEEDS = (1, 2, 3)
WEIGHTS = {
    "uniform": [1 / 3, 1 / 3, 1 / 3],
    "unimax": [1 / 3, 1 / 3, 1 / 3],
    "chameleon": [0.5, 0.3, 0.2],
    "doremi": [0.1, 0.1, 0.8],
}
# Average perplexity by seed; each domain's perplexity is this times its entry of SHARES.
AVERAGES = {
    "uniform": [100.0, 104.0, 96.0],
    "chameleon": [90.0, 95.0, 86.0],
    "doremi": [120.0, 122.0, 118.0],
}
PROXY_COST, STORE_COST = Cost(1e12, 100.0, 100.0, 1), Cost(2e11, 20.0, 20.0, 1)
SHARES = (0.5, 1.0, 1.5)
STEP = "checkpoints/step-00000200"
UNIFORM, CHAMELEON = RUNS = ("uniform-seed1", "chameleon-pretrain-seed1")


def edit(file: Path, **changes: Any) -> None:
    """Change fields of the artifact in ``file``, and remove its checksum."""
    body = json.loads(file.read_text()) | changes
    body.pop("checksum", None)
    file.write_text(json.dumps(body, default=dataclasses.asdict))


def edit_run(root: Path, name: str, **changes: Any) -> None:
    edit(root / "5-base" / name / "run.json", **changes)


def edit_evaluation(root: Path, name: str, **changes: Any) -> None:
    edit(root / f"6-evaluation/{name}.json", **changes)


def write_corpus(root: Path, names: list[str]) -> Corpus:
    corpus = artifact_samples.corpus_in(root, tuple(names))
    corpus = dataclasses.replace(corpus, cost=Cost(0.0, 4.5, 4.5, 1))
    corpus.save()
    return corpus


def random_weights(names: list[str], rng: np.random.Generator) -> dict[str, float]:
    weights = rng.dirichlet(np.full(len(names), 6.0))
    return dict(zip(names, map(float, weights), strict=True))


def random_mixture(names: list[str], rng: np.random.Generator, mode: str = "pretrain") -> Mixture:
    """A Chameleon mixture of random weights, with the affinity of random embeddings."""
    weights, features = random_weights(names, rng), rng.normal(size=(len(names), 8))
    features -= features.mean(axis=0)
    return Mixture(
        weights=weights,
        method=f"chameleon-{mode}",
        parameters={"mode": mode},
        scores={name: 0.1 + 0.01 * i for i, name in enumerate(weights)},
        intervals={name: (0.9 * w, 1.15 * w) for name, w in weights.items()},
        confidence=0.95,
        affinity=(features @ features.T).tolist(),
        provenance=PROVENANCE,
        cost=Cost(0.0, 1.5, 1.5, 1),
    )


def write_training_run(
    root: Path, weights: dict[str, float], method: str, **changes: Any
) -> TrainingRun:
    values: dict[str, Any] = {"status": "finished", "step": 200, "train_iters": 200}
    values |= {"tokens": 200 * 8 * 64, "domain_tokens": {}, "checkpoints": []}
    values |= {"mixture": weights, "mixture_phases": [], "mixture_method": method}
    values |= {"provenance": PROVENANCE, "cost": Cost(1.25e13, 60.0, 30.0, 2)} | changes
    run = dataclasses.replace(artifact_samples.run_in(root), **values)
    run.save()
    return run


def write_checkpoint(folder: Path, content: bytes) -> str:
    """Write a checkpoint with ``content`` as its weights; return its hash."""
    record = artifact_samples.checkpoint_in(folder)
    (folder / "__0_0.distcp").write_bytes(content)
    record = dataclasses.replace(record, files=hash_files(folder))
    record.save()
    return record.hash


def write_losses(root: Path, names: list[str], floors: list[float], seed: int) -> None:
    """Write metrics of 200 steps: noisy power laws that fall to a floor per domain."""
    rng = np.random.default_rng(seed)
    steps = np.arange(1, 201)[:, None]
    falling = (8.5 - np.array(floors)) * (1 + steps / 10) ** -0.8
    losses = pd.DataFrame(floors + falling + rng.normal(0, 0.08, falling.shape), columns=names)
    records: list[dict[str, Any]] = [
        {"step": step, "loss": row.mean(), "domain_loss": row.to_dict()}
        for step, (_, row) in enumerate(losses.iterrows(), start=1)
    ]
    for record in records[49::50]:
        record["validation_loss"] = {n: x + 0.1 for n, x in record["domain_loss"].items()}
    artifact_samples.write_metrics(root / METRICS_NAME, records)


def evaluation(names: list[str], losses: list[float], **changes: Any) -> EvaluationResult:
    domains = {name: DomainLoss(losses[i], 640, 6.0 + 0.1 * i) for i, name in enumerate(names)}
    values: dict[str, Any] = {"step": 200, "protocol": PROTOCOL, "domains": domains, "left_out": []}
    values |= {"provenance": PROVENANCE, "cost": Cost(2e11, 3.0, 1.5, 2)} | changes
    return dataclasses.replace(artifact_samples.sample_result(), **values)


def write_run_folder(root: Path, names: list[str] = NAMES, seed: int = 0) -> Path:
    """Write all stages: a proxy, two mixtures, and an evaluated base run of each mixture."""
    rng = np.random.default_rng(seed)
    corpus = write_corpus(root / "1-corpus", names)
    uniform = Mixture.uniform(names).weights
    floors = rng.uniform(2.0, 4.5, len(names)).tolist()
    proxy = root / "2-proxy/tiny-seed1"
    write_training_run(proxy, uniform, "uniform", cost=Cost(3e12, 16.0, 8.0, 2))
    write_losses(proxy, names, [x + 0.5 for x in floors], seed=1)
    recipe = EmbeddingRecipe("1", 1, 64, 16, 0, "0")
    EmbeddingStore(root / "3-embeddings", recipe, 8, {}, PROVENANCE, Cost(4e11, 5.0, 2.5, 2)).save()
    mixtures = {mode: random_mixture(names, rng, mode) for mode in ("pretrain", "finetune")}
    for mode, mixture in mixtures.items():
        mixture.save(root / f"4-mixture/chameleon-{mode}.json")
    weights = mixtures["pretrain"].weights
    runs = {UNIFORM: (uniform, "uniform"), CHAMELEON: (weights, "chameleon-pretrain")}
    for i, (name, (trained, method)) in enumerate(runs.items()):
        shifted = (np.array(floors) + 0.1 + rng.normal(0, 0.05, len(names))).tolist()
        write_training_run(root / "5-base" / name, trained, method)
        write_losses(root / "5-base" / name, names, shifted, seed=2 + i)
        result = evaluation(names, shifted, corpus_hash=corpus.hash)
        result.save(root / "6-evaluation" / f"{name}.json")
    return root


def rows_of(table: Table) -> dict[str, list[str]]:
    """Name of a row -> its other cells, including the summary rows."""
    return {row[0]: list(row[1:]) for row in (*table.rows, *table.summary)}


def write_sweep(root: Path, mixtures: dict[str, list[Mixture]]) -> Sweep:
    """Write a sweep over values 1, 2, ... of each key in ``mixtures``; the centre is at 1."""
    centre: dict[str, SettingValue] = dict.fromkeys(mixtures, 1)
    points: dict[str, SweepPoint] = {}
    for parameter, along in mixtures.items():
        for value, mixture in enumerate(along, start=1):
            values = {**centre, parameter: value}
            if values == centre and points:
                continue
            file = f"4-mixture/sweep/{parameter}-{value}.json"
            mixture.save(root / file)
            read = Mixture.load(root / file).hash  # loading changes the hash by normalizing weights
            points[file] = SweepPoint(values, file, read, ["2-proxy/tiny-seed1"])
    axes: dict[str, list[SettingValue]] = {
        parameter: list(range(1, len(along) + 1)) for parameter, along in mixtures.items()
    }
    cost = Cost(3e12, 7200.0, 3600.0, 2)
    sweep = Sweep(root, "chameleon", axes, list(points.values()), PROVENANCE, cost)
    sweep.save()
    return sweep


DOWNSTREAM_PROTOCOL = DownstreamProtocol("0.4.13", [0, 1], None, 1234, "float32")


def downstream(
    tasks: dict[str, dict[int, float]],
    protocol: DownstreamProtocol = DOWNSTREAM_PROTOCOL,
    **changes: Any,
) -> DownstreamResult:
    """A result of ``tasks``: task -> shots -> accuracy. Errors are 1%, and errors of means 2%.

    The bits per byte are 2 minus the accuracy.
    """
    scores = {}
    for task, found in tasks.items():
        shots = {n: ShotScore(a, 0.01, 100, 0, f"{task} {n}") for n, a in found.items()}
        accuracy = sum(found.values()) / len(found)
        mean = Score(accuracy, 0.02, bits_per_byte=2 - accuracy, bits_per_byte_error=0.03)
        is_complete = set(found) == set(protocol.shots)
        scores[task] = TaskScore("acc", "1.0", "train", shots, mean if is_complete else None)
    cost = Cost(1e12, 8.0, 4.0, 2)
    result = DownstreamResult("run", "x", 200, protocol, scores, [], PROVENANCE, cost)
    return dataclasses.replace(result, **changes)


def save(root: Path, name: str, result: DownstreamResult) -> None:
    result.save(root / "6-evaluation" / f"{name}.json")


# Names that a page would run as code, break at, or display wrongly if they were not escaped.
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
TASKS = ("arc_easy", "piqa", "winogrande")
ZERO_SHOT = dataclasses.replace(DOWNSTREAM_PROTOCOL, shots=[0])


def write_full_folder(root: Path, names: list[str], seed: int = 0, windows: int = 12) -> Path:
    """Write a run folder that fills every section of a report.

    Each domain has embeddings of ``windows`` windows.
    """
    write_run_folder(root, names, seed)
    rng = np.random.default_rng(seed)
    difficulty = {name: rng.normal(0, 0.3, 12) for name in names}
    for name in RUNS:
        run = TrainingRun.load(root / "5-base" / name)
        tokens = {
            domain: SampledTokens(weight, weight * run.tokens, round(weight * run.tokens), 1.5)
            for domain, weight in run.mixture.items()
        }
        edit_run(root, name, domain_tokens=tokens)
        result = EvaluationResult.load(root / f"6-evaluation/{name}.json")
        domains = {}
        for domain, loss in result.domains.items():
            losses = loss.loss + difficulty[domain]  # [12]: each of 12 documents has 50 tokens
            clusters = Clusters((50 * losses).tolist(), [50] * 12, [200] * 12)
            domains[domain] = DomainLoss(losses.mean(), 600, loss.unigram_loss, 2400, clusters)
        edit_evaluation(root, name, domains=domains)
        accuracies = {task: {0: float(rng.random())} for task in TASKS}
        answers = downstream(accuracies, ZERO_SHOT, checkpoint_hash=name)
        save(root, f"{name}-downstream", answers)
    Mixture(random_weights(names, rng), "doremi", cost=Cost(9e12, 40.0, 20.0, 2)).save(
        root / "4-mixture/doremi.json"
    )
    store = EmbeddingStore.load(root / "3-embeddings")
    for name in names:
        vectors = rng.normal(size=store.hidden_size) + 0.4 * rng.normal(size=(windows, 8))
        store = store.write_domain(name, vectors.astype(np.float32), 100, "1", Cost())
    centre = Mixture.load(root / "4-mixture/chameleon-pretrain.json")
    others = [dataclasses.replace(centre, weights=random_weights(names, rng)) for _ in range(2)]
    write_sweep(root, {"ridge": [centre, *others], "num_windows": [centre, others[1]]})
    return root


def made_by(**options: Any) -> Provenance:
    """Provenance of a run with ``options``."""
    options = {"train_iters": 200, "optimizer": {"lr": 1e-2}, **options}
    return dataclasses.replace(PROVENANCE, options=options)


def write_seeded_runs(root: Path) -> Path:
    """Three runs each of Uniform, Chameleon and DoReMi; UniMax has Uniform's weights and no run."""
    corpus = write_corpus(root / "1-corpus", NAMES)
    proxy = root / "2-proxy/nano-seed1"
    digest = write_checkpoint(proxy / STEP, b"proxy")
    uniform = Mixture.uniform(NAMES).weights
    write_training_run(proxy, uniform, "uniform", checkpoints=[STEP], cost=PROXY_COST)
    recipe = EmbeddingRecipe(digest, 1, 64, 16, 0, "0")
    EmbeddingStore(root / "3-embeddings/nano", recipe, 8, {}, PROVENANCE, STORE_COST).save()
    inputs = dataclasses.replace(PROVENANCE, inputs={"checkpoint": digest})
    embedding = {"embedding": dataclasses.asdict(recipe)}
    chameleon = {"provenance": inputs, "parameters": embedding, "cost": Cost(0.0, 5.0, 5.0, 1)}
    doremi = {"parameters": {"made_from": []}, "cost": Cost(6e12, 500.0, 500.0, 1)}
    costs: dict[str, Any] = {"chameleon": chameleon, "doremi": doremi}
    for name, weights in WEIGHTS.items():
        mixture = Mixture(dict(zip(NAMES, weights, strict=True)), name, **costs.get(name, {}))
        mixture.save(root / f"4-mixture/{name}.json")
        for seed, average in zip(SEEDS, AVERAGES.get(name, ()), strict=False):
            run = f"{name}-seed{seed}"
            digest = write_checkpoint(root / "5-base" / run / STEP, run.encode())
            values = {"checkpoints": [STEP], "provenance": made_by(seed=seed)}
            write_training_run(root / "5-base" / run, mixture.weights, name, **values)
            losses = [math.log(average * share) for share in SHARES]
            result = evaluation(NAMES, losses, corpus_hash=corpus.hash, checkpoint_hash=digest)
            result.save(root / f"6-evaluation/{run}.json")
    return root
