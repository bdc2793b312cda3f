"""Draw by an export with torchtitan: python torchtitan_reads.py EXPORT FOLDER SEQUENCE_LENGTH.

FOLDER/NAME.jsonl are the texts of each domain: token ids, as words.
"""

from __future__ import annotations

import itertools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from datasets import load_dataset
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import (
    DATASETS,
    HFDataSource,
    InterleavedHuggingFaceTextDataLoader,
)

SAMPLES = 2000


class WordsAreIds(BaseTokenizer):
    """A tokenizer for texts that are token ids."""

    def encode(self, text: str, **_beginning_and_end: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def get_vocab_size(self) -> int:
        return 251


def load_texts(folder: str, path: str) -> Any:
    """The texts of one domain."""
    cache = str(Path(folder) / "cache")
    return load_dataset("json", data_files=path, split="train", cache_dir=cache)


def main(export: str, folder: str, sequence_length: int) -> None:
    """Write the samples to FOLDER/samples.json."""
    for path in Path(folder).glob("*.jsonl"):
        DATASETS[path.stem] = DatasetConfig(
            path=str(path),
            loader=partial(load_texts, folder),
            sample_processor=lambda row: row["text"],
        )
    given = json.loads(Path(export).read_text())
    config = InterleavedHuggingFaceTextDataLoader.Config(
        sources=[HFDataSource(**source) for source in given["sources"]]
    )
    loader = InterleavedHuggingFaceTextDataLoader(
        config,
        dp_world_size=1,
        dp_rank=0,
        tokenizer=WordsAreIds(),
        seq_len=sequence_length,
        local_batch_size=1,
    )
    samples = [inputs["input"][0].tolist() for inputs, _ in itertools.islice(loader, SAMPLES)]
    (Path(folder) / "samples.json").write_text(json.dumps(samples))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
