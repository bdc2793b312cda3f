"""Options of tools/export_mixture.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from megatron_chameleon.options.ranges import LargeCount

ExportFormat = Literal[
    "megatron-data-path",
    "megatron-data-args",
    "megatron-per-split",
    "megatron-bridge",
    "torchtitan",
    "olmo-core",
    "litgpt",
    "csv",
    "json",
]


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Write a mixture in the form that another trainer reads. Paths are absolute, weights exact."""

    mixture: Path
    """The mixture.json, from tools/compute_mixture.py or your own."""
    corpus: Path
    """Folder written by tools/preprocess_data.py, of the mixture's domains."""
    format: ExportFormat
    """'megatron-data-path': the words of --data-path or --train-data-path, on one line.

    'megatron-data-args': the same words for --data-args-path, one domain a line.

    'megatron-per-split': for --per-split-data-args-path: the corpus's own train, valid and test.

    'megatron-bridge': the blend_per_split of Megatron Bridge's GPTDatasetConfig.

    'torchtitan': the sources of its InterleavedHuggingFaceTextDataLoader.

    'olmo-core': OLMo-core's SourceMixtureList.

    'litgpt': arguments of CombinedStreamingDataset, by which litgpt's data modules mix.

    'csv' and 'json': a table of all domains."""
    output: Path | None = None
    """The file to write; printed unless given."""
    overwrite: bool = False
    """Replace the output file if there is one."""
    split: Literal["train", "valid", "test"] | None = None
    """Which split's files the formats megatron-data-path, megatron-data-args and olmo-core name;
    train unless given. The others name all splits, or none."""
    token_budget: LargeCount | None = None
    """Tokens of the training to come, for olmo-core alone, which repeats no text unless it is told
    how often it may; the budget that the mixture was computed for unless given."""
