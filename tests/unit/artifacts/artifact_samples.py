"""A sample artifact of each kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_chameleon import artifacts as a
from megatron_chameleon.artifacts import downstream_result as downstream
from megatron_chameleon.artifacts import swarm
from megatron_chameleon.artifacts.checkpoint import hash_files
from megatron_chameleon.artifacts.corpus import SPLITS, file_name_of, index_file_bytes
from megatron_chameleon.artifacts.discovered import (
    DiscoveredDomain,
    DiscoveredDomains,
    NearDocument,
)
from megatron_chameleon.artifacts.embedding_store import DomainEmbeddings
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.record import FolderRecord
from megatron_chameleon.artifacts.training_run import BatchLayout

PROVENANCE = a.Provenance(
    command=["tool.py", "--flag", "ä ö"],
    options={"layer": None, "nested": {"lr": 1e-4, "names": ["a", "b"]}},
    inputs={"corpus": "0" * 64},
    versions={"python": "3.11"},
    git_commit=None,
    created="2026-01-01T00:00:00+00:00",
)
COST = a.Cost(flops=1.5e15, device_seconds=12.25, wall_seconds=6.125, num_devices=2)
RECIPE = a.EmbeddingRecipe("m" * 64, 2, 128, 4096, 0, "t" * 64)
TOKENIZER = a.TokenizerIdentity("tokenizers", "tokenizer.json", "t" * 64, 100, 99)


@dataclasses.dataclass(frozen=True)
class Sample:
    """An artifact on disk: its file and its content."""

    file: Path
    written: Any

    def load(self) -> Any:
        """Read the artifact."""
        is_folder = isinstance(self.written, FolderRecord)
        return type(self.written).load(self.written.root if is_folder else self.file)


def write_samples(root: Path) -> dict[str, Sample]:
    """Write an artifact of each kind into ``root``: kind -> sample."""
    near = NearDocument("a", 7, 0.5, "Once ...")
    cluster = DiscoveredDomain(4, {"train": 20, "valid": 2}, {"a": 1.0}, [near])
    folders = [
        corpus_in(root / "c"),
        run_in(root / "r"),
        checkpoint_in(root / "k"),
        a.EmbeddingStore(
            *(
                root / "e",
                RECIPE,
                8,
                {"a": DomainEmbeddings("a.safetensors", 3, "h", "0" * 64, 24)},
            ),
            *(PROVENANCE, COST),
        ),
        sample_sweep(root / "s"),
        swarm.SwarmRecord(root, {"seed": 1}, "c" * 64, ["a", "b"], [[0.25, 0.75]], PROVENANCE),
        DiscoveredDomains(
            *(root, 1, {2: 0.5, 3: -0.25}, 12.5, 100, "m" * 64, 2, 128, 4, 0, 1),
            *({"cluster 0": cluster}, ["a"], PROVENANCE, COST),
        ),
    ]
    files = [
        sample_mixture(),
        sample_result(),
        swarm.MemberRecord(12, [10, 20], [[1.5, None], [1.25, None]], None, {"sciq": 1.25}, COST),
        sample_part(),
        sample_downstream(),
    ]
    for folder in folders:
        folder.save()
    for file in files:
        file.save(root / "files" / f"{file.KIND}.json")
    return {each.KIND: Sample(each.root / each.FILE_NAME, each) for each in folders} | {
        each.KIND: Sample(root / "files" / f"{each.KIND}.json", each) for each in files
    }


def corpus_in(root: Path, names: tuple[str, ...] = ("a", "ü/.."), content: int = 7) -> a.Corpus:
    """A corpus of two documents and five uint16 tokens per split; each .bin repeats ``content``."""
    root.mkdir(parents=True)
    domains = {
        name: a.Domain(*(_split_in(root, name, s, content) for s in SPLITS)) for name in names
    }
    return a.Corpus(root, TOKENIZER, "uint16", domains, PROVENANCE, COST)


def _split_in(root: Path, name: str, split: str, content: int) -> a.DomainSplit:
    prefix = f"{file_name_of(name)}-{split}"
    files = [root / f"{prefix}.bin", root / f"{prefix}.idx"]
    files[0].write_bytes(bytes([content] * 10))
    files[1].write_bytes(bytes(index_file_bytes(2)))
    return a.DomainSplit(prefix, 2, 5, 33, sha256_of_files(*files))


def run_in(root: Path) -> a.TrainingRun:
    return a.TrainingRun(
        root=root,
        status="interrupted",
        step=3,
        train_iters=6,
        tokens=768,
        model={"num_layers": 2, "vocab_size": 100},
        parameters=1_000_000,
        mixture={"a": 0.1, "b": 0.9},
        mixture_phases=[
            a.MixturePhase(0, {"a": 0.5, "b": 0.5}),
            a.MixturePhase(8, {"a": 1, "b": 9}),
        ],
        mixture_method="manual",
        domain_tokens={
            "a": a.SampledTokens(0.1, 76.8, 64, 0.25),
            "b": a.SampledTokens(0.9, 691.2, 704, 2),
        },
        checkpoints=["checkpoints/step-00000003"],
        provenance=PROVENANCE,
        cost=COST,
        batch_layouts=[BatchLayout(0, 2, 4)],
        order_version=2,
        tokenizer=TOKENIZER,
    )


def checkpoint_record(root: Path) -> a.CheckpointRecord:
    """The record of a checkpoint without files."""
    return a.CheckpointRecord(
        root=root,
        model={"num_layers": 2},
        step=3,
        samples=24,
        domain_samples={"a": 2, "b": 22},
        mixture_phases=[a.MixturePhase(0, {"a": 0.1, "b": 0.9})],
        domain_tokens={"a": 64, "b": 704},
        tokenizer_hash="t" * 64,
        corpus_hash="c" * 64,
        mixture_hash="m" * 64,
        layout={"world_size": 2, "sequence_parallel": True, "device": "cpu"},
        files={},
        provenance=PROVENANCE,
    )


def checkpoint_in(root: Path) -> a.CheckpointRecord:
    """A checkpoint folder of four small files and its record."""
    root.mkdir(parents=True)
    for name in ("__0_0.distcp", "common.pt", ".metadata", "metadata.json"):
        (root / name).write_bytes(b"content of " + name.encode())
    record = dataclasses.replace(checkpoint_record(root), files=hash_files(root))
    record.save()
    return record


def sample_mixture() -> a.Mixture:
    return a.Mixture(
        weights={"a": 0.125, "ü/..": 0.875},
        method="chameleon-pretrain",
        parameters={"layer": 3, "ceiling": None},
        scores={"a": 1e-300, "ü/..": 0.1},
        intervals={"a": (0.1, 0.2), "ü/..": (0.8, 0.9)},
        confidence=0.95,
        outweighs=[("ü/..", "a", 0.75)],
        affinity=[[1.0, -0.5], [-0.5, 1.0]],
        token_budget=10**12,
        epochs={"a": 0.1, "ü/..": 3.3},
        max_epochs=3.3,
        unconstrained={"a": 0.1, "ü/..": 0.9},
        capped=["ü/.."],
        provenance=PROVENANCE,
        cost=COST,
    )


def sample_result() -> a.EvaluationResult:
    return a.EvaluationResult(
        checkpoint="run/checkpoints/step-00000003",
        checkpoint_hash="k" * 64,
        corpus_hash="c" * 64,
        step=3,
        protocol=a.Protocol(split="valid", window_length=32, max_tokens=1000),
        domains={
            "a": a.DomainLoss(3.25, 4, 5.5, 9, a.Clusters([1 / 3, 1e-300], [3, 1], [9, 0])),
            "b": a.DomainLoss(1 / 3, 10, 0.0),
        },
        left_out=["ü/.."],
        provenance=PROVENANCE,
        cost=COST,
    )


def sample_downstream() -> downstream.DownstreamResult:
    """Downstream results of a complete task, and of a task without 2-shot accuracy."""
    bits = {"bits_per_byte": 1.25, "bits_per_byte_error": 0.5}
    scores = {
        0: downstream.ShotScore(0.5, 0.25, 4, 0, "hash 0", **bits, acc=0.25, acc_error=0.125),
        2: downstream.ShotScore(1.0, None, 1, 1, "hash 2"),
    }
    complete = downstream.TaskScore(
        "acc_norm", "1.0", "train", scores, downstream.Score(0.75, 0.125, **bits)
    )
    return downstream.DownstreamResult(
        checkpoint="run",
        checkpoint_hash="x",
        step=3,
        protocol=downstream.DownstreamProtocol("0.4.13", [0, 2], None, 1234, "float32"),
        tasks={
            "sciq": complete,
            "race": dataclasses.replace(complete, by_shots={0: scores[0]}, mean=None),
        },
        gaps=[downstream.Gap("race", 2, "too few documents")],
        provenance=PROVENANCE,
        cost=COST,
    )


def sample_part() -> downstream.DownstreamPart:
    settings = downstream.PartSettings("hash", "0.4.13", "sciq", 2, None, 1234, "float32", "hub")
    bits = [1.0, 2.5, 0.25, 4.0]
    return downstream.DownstreamPart(
        settings, "acc_norm", "1.0", "train", "0110", bits, 3, "r", "q", COST, "0100"
    )


def sample_sweep(root: Path) -> a.Sweep:
    """A sweep of two axes around one centre, without mixture files."""
    centre: dict[str, a.SettingValue] = {"model": "82m", "train_iters": 2000, "ridge": 10.0}
    axes: dict[str, list[a.SettingValue]] = {"train_iters": [2000, 5000], "ridge": [1.0, 10.0]}
    inputs = ["2-proxy/ü", "3-embeddings/b"]
    changes: list[dict[str, a.SettingValue]] = [{}, {"train_iters": 5000}, {"ridge": 1.0}]
    points = [
        a.SweepPoint({**centre, **change}, f"4-mixture/sweep/{i}.json", f"{i}", inputs)
        for i, change in enumerate(changes)
    ]
    return a.Sweep(root, "chameleon", axes, points, PROVENANCE, COST)


def write_metrics(path: Path, records: list[dict[str, Any]]) -> None:
    """Write a metrics.jsonl of ``records``."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
