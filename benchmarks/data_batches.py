"""Batches of samples: one gather per batch, compared with Megatron's collated dataset items."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from benchmarks.measure import compared, format_row, interleaved
from benchmarks.synthetic_domains import (
    IDENTITY,
    data_path_of,
    megatron_dataset,
    one_process_group,
    write_domains,
)
from megatron_chameleon.blend.data_path import DataPath, data_path_tokens
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.schedule import MixtureSchedule

BATCH_SIZE = 64
BATCHES = 40
REPEATS = 7
SEQ_LENGTHS = (512, 2048)


def measure(num_domains: int = 7, num_documents: int = 100_000) -> list[dict[str, Any]]:
    """Time both on one thread with all tokens in the page cache, and compare the batches."""
    rows = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary, one_process_group():
        prefixes = write_domains(Path(temporary), num_domains, num_documents)
        given = data_path_of(prefixes)
        for prefix in prefixes:
            Path(f"{prefix}.bin").read_bytes()
        for seq_length in SEQ_LENGTHS:
            row = _measure_one(given, seq_length, Path(temporary) / f"cache-{seq_length}")
            print(format_row(row))
            rows.append(row)
    torch.set_num_threads(threads)
    return rows


def _measure_one(given: str, seq_length: int, cache: Path) -> dict[str, Any]:
    num_samples = BATCH_SIZE * BATCHES * (REPEATS + 1)
    path = DataPath.parse(given)
    data, schedule = (
        data_path_tokens(path, "1", IDENTITY),
        MixtureSchedule.fixed(path.weights or ()),
    )
    ours = BlendedTokens(data, schedule, num_samples, seq_length, seed=1234)
    theirs = megatron_dataset(given, num_samples, seq_length, cache)
    _compare(ours, theirs)
    # Each repeat reads the next batches, as training does; the first ones were the warm-up.
    ranges = {name: iter(range(BATCHES, BATCHES * (REPEATS + 1))) for name in ("ours", "theirs")}

    def repeat(name: str, read: Callable[[list[int]], object]) -> None:
        for _ in range(BATCHES):
            first = next(ranges[name]) * BATCH_SIZE
            read(list(range(first, first + BATCH_SIZE)))

    seconds = interleaved(
        {
            "ours": lambda: repeat("ours", ours.batch),
            "theirs": lambda: repeat(
                "theirs", lambda ids: default_collate([theirs[i] for i in ids])
            ),
        },
        REPEATS,
    )
    row = compared(f"batches of {BATCH_SIZE} at sequence {seq_length}", seconds)
    row["samples_per_second"] = {
        name: BATCH_SIZE * BATCHES / median for name, median in row["seconds"].items()
    }
    return row


def _compare(ours: BlendedTokens, theirs: Any) -> None:
    for batch in range(BATCHES):
        ids = list(range(batch * BATCH_SIZE, (batch + 1) * BATCH_SIZE))
        found, expected = ours.batch(ids), default_collate([theirs[i] for i in ids])
        assert torch.equal(found["domain"], expected.pop("dataset_id"))
        for name, part in expected.items():
            assert torch.equal(found[name], part), name
