"""Downstream results with chosen accuracies, which only tests read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import Cost
from megatron_chameleon.artifacts.downstream_result import (
    Accuracy,
    DownstreamProtocol,
    DownstreamResult,
    Gap,
    ShotScore,
    TaskScore,
)
from tests.unit.report.report_samples import PROVENANCE

PROTOCOL = DownstreamProtocol("0.4.13", [0, 1], None, 1234, "float32")


def score(task: str, by_shots: dict[int, float], shots: list[int], **changes: Any) -> TaskScore:
    """Of a task with these accuracies; standard errors are a hundredth, of the mean a fiftieth."""
    mean = sum(by_shots.values()) / len(by_shots)
    found = TaskScore(
        metric="acc_norm" if task in ("sciq", "piqa") else "acc",
        version="1.0",
        shots_from="train",
        by_shots={n: ShotScore(a, 0.01, 100, 0, f"{task} {n}") for n, a in by_shots.items()},
        mean=Accuracy(mean, 0.02) if set(by_shots) == set(shots) else None,
    )
    return dataclasses.replace(found, **changes)


def downstream(
    tasks: dict[str, dict[int, float]],
    gaps: list[Gap] | None = None,
    protocol: DownstreamProtocol = PROTOCOL,
    **changes: Any,
) -> DownstreamResult:
    """Task -> number of shots -> accuracy."""
    result = DownstreamResult(
        checkpoint="run",
        checkpoint_hash="x",
        step=200,
        protocol=protocol,
        tasks={task: score(task, found, protocol.shots) for task, found in tasks.items()},
        gaps=gaps or [],
        provenance=PROVENANCE,
        cost=Cost(1e12, 8.0, 4.0, 2),
    )
    return dataclasses.replace(result, **changes)


def save(root: Path, name: str, result: DownstreamResult) -> None:
    result.save(root / "6-evaluation" / f"{name}.json")
