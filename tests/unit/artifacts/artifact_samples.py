"""A sample artifact of each kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Clusters,
    Corpus,
    Cost,
    Domain,
    DomainLoss,
    DomainSplit,
    EmbeddingRecipe,
    EmbeddingStore,
    EvaluationResult,
    Mixture,
    MixturePhase,
    Protocol,
    Provenance,
    SampledTokens,
    SettingValue,
    Sweep,
    SweepPoint,
    TokenizerIdentity,
    TrainingRun,
)
from megatron_chameleon.artifacts.checkpoint import hash_files
from megatron_chameleon.artifacts.corpus import SPLITS, file_name_of, index_file_bytes
from megatron_chameleon.artifacts.discovered import (
    DiscoveredDomain,
    DiscoveredDomains,
    NearDocument,
)
from megatron_chameleon.artifacts.downstream_result import (
    Accuracy,
    DownstreamPart,
    DownstreamProtocol,
    DownstreamResult,
    Gap,
    PartSettings,
    ShotScore,
    TaskScore,
)
from megatron_chameleon.artifacts.embedding_store import DomainEmbeddings
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.record import FolderRecord
from megatron_chameleon.artifacts.swarm import MemberRecord, SwarmRecord

PROVENANCE = Provenance(
    command=["tool.py", "--flag", "ä ö"],
    options={"layer": None, "nested": {"lr": 1e-4, "names": ["a", "b"]}},
    inputs={"corpus": "0" * 64},
    versions={"python": "3.11"},
    git_commit=None,
    created="2026-01-01T00:00:00+00:00",
)
COST = Cost(flops=1.5e15, device_seconds=12.25, wall_seconds=6.125, num_devices=2)
RECIPE = EmbeddingRecipe("m" * 64, 2, 128, 4096, 0, "t" * 64)


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
    store = EmbeddingStore(
        *(root / "e", RECIPE, 8, {"a": DomainEmbeddings("a.safetensors", 3, "h", "0" * 64)}),
        *(PROVENANCE, COST),
    )
    swarm = SwarmRecord(root, {"seed": 1}, "c" * 64, ["a", "b"], [[0.25, 0.75]], PROVENANCE)
    member = MemberRecord(12, [10, 20], [[1.5, None], [1.25, None]], None, COST)
    near = NearDocument("a", 7, 0.5, "Once ...")
    domain = DiscoveredDomain(4, {"train": 20, "valid": 2}, {"a": 1.0}, [near])
    discovered = DiscoveredDomains(
        *(root, 1, {2: 0.5, 3: -0.25}, 12.5, 100, "m" * 64, 2, 128, 4, 0, 1),
        *({"cluster 0": domain}, ["a"], PROVENANCE, COST),
    )
    settings = PartSettings("hash", "0.4.13", "sciq", 2, None, 1234, "float32", "hub")
    part = DownstreamPart(settings, "acc", "1.0", "train", "0110", 0, "r", "q", COST)
    scores = {0: ShotScore(0.5, 0.25, 4, 0, "r"), 2: ShotScore(1.0, None, 1, 1, "s")}
    downstream = DownstreamResult(
        *("run", "x", 3, DownstreamProtocol("0.4.13", [0, 2], None, 1234, "float32")),
        {"sciq": TaskScore("acc", "1.0", "train", scores, Accuracy(0.75, 0.125))},
        [Gap("race", 2, "too few documents")],
        *(PROVENANCE, COST),
    )
    samples = []
    for record in (
        *(corpus_in(root / "c"), run_in(root / "r"), checkpoint_in(root / "k"), store),
        *(sample_sweep(root / "s"), swarm, discovered),
    ):
        record.save()
        samples.append(Sample(record.root / record.FILE_NAME, record))
    for file_record in (sample_mixture(), sample_result(), member, part, downstream):
        path = root / "files" / f"{file_record.KIND}.json"
        file_record.save(path)
        samples.append(Sample(path, file_record))
    return {sample.written.KIND: sample for sample in samples}


def corpus_in(root: Path, names: tuple[str, ...] = ("a", "ü/.."), content: int = 7) -> Corpus:
    """A corpus of two documents and five uint16 tokens per split; all bytes are ``content``."""
    root.mkdir(parents=True)
    domains = {
        name: Domain(**{s: _split_in(root, name, s, content) for s in SPLITS}) for name in names
    }
    tokenizer = TokenizerIdentity("tokenizers", "tokenizer.json", "t" * 64, 100, 99)
    return Corpus(root, tokenizer, "uint16", domains, PROVENANCE, COST)


def _split_in(root: Path, name: str, split: str, content: int) -> DomainSplit:
    prefix = f"{file_name_of(name)}-{split}"
    files = [root / f"{prefix}.bin", root / f"{prefix}.idx"]
    files[0].write_bytes(bytes([content] * 10))
    files[1].write_bytes(bytes(index_file_bytes(2)))
    return DomainSplit(prefix, 2, 5, 33, sha256_of_files(*files))


def run_in(root: Path) -> TrainingRun:
    return TrainingRun(
        root=root,
        status="interrupted",
        step=3,
        train_iters=6,
        tokens=768,
        model={"size": {"num_layers": 2}, "vocab_size": 100},
        parameters=1_000_000,
        mixture={"a": 0.1, "b": 0.9},
        mixture_phases=[MixturePhase(0, {"a": 0.5, "b": 0.5}), MixturePhase(8, {"a": 1, "b": 9})],
        mixture_method="manual",
        domain_tokens={
            "a": SampledTokens(0.1, 76.8, 64, 0.25),
            "b": SampledTokens(0.9, 691.2, 704, 2),
        },
        checkpoints=["checkpoints/step-00000003"],
        provenance=PROVENANCE,
        cost=COST,
    )


def checkpoint_in(root: Path) -> CheckpointRecord:
    """A checkpoint folder of four small files and its record."""
    root.mkdir(parents=True)
    (root / "__0_0.distcp").write_bytes(b"weights")
    (root / "common.pt").write_bytes(b"state of the optimizer")
    (root / ".metadata").write_bytes(b"index")
    (root / "metadata.json").write_bytes(b"{}")
    record = CheckpointRecord(
        root=root,
        model={"size": {"num_layers": 2}},
        step=3,
        samples=24,
        domain_samples={"a": 2, "b": 22},
        mixture_phases=[MixturePhase(0, {"a": 0.1, "b": 0.9})],
        domain_tokens={"a": 64, "b": 704},
        tokenizer_hash="t" * 64,
        corpus_hash="c" * 64,
        mixture_hash="m" * 64,
        layout={"world_size": 2, "sequence_parallel": True, "device": "cpu"},
        files=hash_files(root),
        provenance=PROVENANCE,
    )
    record.save()
    return record


def sample_mixture() -> Mixture:
    return Mixture(
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


def sample_result() -> EvaluationResult:
    return EvaluationResult(
        checkpoint="run/checkpoints/step-00000003",
        checkpoint_hash="k" * 64,
        corpus_hash="c" * 64,
        step=3,
        protocol=Protocol(split="valid", window_length=32, max_tokens=1000),
        domains={
            "a": DomainLoss(3.25, 4, 5.5, 9, Clusters([1 / 3, 1e-300], [3, 1], [9, 0])),
            "b": DomainLoss(1 / 3, 10, 0.0),
        },
        left_out=["ü/.."],
        provenance=PROVENANCE,
        cost=COST,
    )


def sample_sweep(root: Path) -> Sweep:
    """Two axes around one centre, without mixture files."""
    centre: dict[str, SettingValue] = {"model_size": "82m", "train_iters": 2000, "ridge": 10.0}
    points = [centre, {**centre, "train_iters": 5000}, {**centre, "ridge": 1.0}]
    return Sweep(
        root=root,
        method="chameleon",
        axes={"train_iters": [2000, 5000], "ridge": [1.0, 10.0]},
        points=[
            SweepPoint(
                settings, f"4-mixture/sweep/{i}.json", f"{i}", ["2-proxy/ü", "3-embeddings/b"]
            )
            for i, settings in enumerate(points)
        ],
        provenance=PROVENANCE,
        cost=COST,
    )


def write_metrics(path: Path, records: list[dict[str, Any]]) -> None:
    """Write a metrics.jsonl of ``records``."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
