"""Time from .bin/.idx files to a dataset, without cached indices: ours and Megatron's builder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

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

SEQ_LENGTH = 512


def measure(
    num_domains: int = 7,
    num_documents: int = 1_000_000,
    num_samples: int = 20_000_000,
    repeats: int = 5,
) -> list[dict[str, Any]]:
    """Time both with the files in the page cache and no cached indices, and compare samples.

    Megatron's builder writes its indices to a folder; ours keeps them in memory, and is also timed
    with such a folder.
    """
    with tempfile.TemporaryDirectory() as temporary, one_process_group():
        folder = Path(temporary)
        # Short documents: the time to build depends on their number, not on their tokens.
        prefixes = write_domains(folder, num_domains, num_documents, median_length=60)
        given, cache, own_cache = data_path_of(prefixes), folder / "theirs", folder / "ours"

        def ours(cache: Path | None = None) -> BlendedTokens:
            path = DataPath.parse(given)
            data = data_path_tokens(path, "1", IDENTITY)
            schedule = MixtureSchedule.fixed(path.weights or ())
            return BlendedTokens(data, schedule, num_samples, SEQ_LENGTH, seed=1234, cache=cache)

        def ours_with_cache() -> BlendedTokens:
            shutil.rmtree(own_cache, ignore_errors=True)
            return ours(own_cache)

        def theirs() -> Any:
            shutil.rmtree(cache, ignore_errors=True)
            return megatron_dataset(given, num_samples, SEQ_LENGTH, cache)

        _compare(ours(), theirs(), num_samples)
        seconds = interleaved(
            {"ours": ours, "ours, written to a cache": ours_with_cache, "theirs": theirs}, repeats
        )
    what = (
        f"cold build, {num_domains} domains, {num_documents:,} documents, {num_samples:,} samples"
    )
    row = compared(what, seconds)
    print(format_row(row))
    return [row]


def _compare(ours: BlendedTokens, theirs: Any, num_samples: int) -> None:
    for index in np.random.default_rng(0).integers(0, num_samples, 2000).tolist():
        found, expected = ours[index], theirs[index]
        assert int(found["domain"]) == expected["dataset_id"]
        assert bool((found["tokens"] == expected["tokens"]).all())
