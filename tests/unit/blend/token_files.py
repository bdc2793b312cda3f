"""Inputs of Megatron's own data sets: .bin/.idx pairs with chosen lengths, and options."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from megatron_chameleon.artifacts import TokenizerIdentity
from megatron_chameleon.corpus.indexed import IndexedWriter


@dataclasses.dataclass(frozen=True)
class MegatronTokenizer:
    """The attributes of a tokenizer that Megatron's datasets read."""

    eod: int
    vocab_size: int

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def dataset_config(tokenizer: TokenizerIdentity, **more: Any) -> GPTDatasetConfig:
    """Megatron's options without resets and masks at document boundaries."""
    return GPTDatasetConfig(
        tokenizer=MegatronTokenizer(tokenizer.eod_id, tokenizer.vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **more,
    )


def write_file(prefix: Path, lengths: list[int]) -> Path:
    """Write a data set of these sequences, replacing an existing one."""
    for suffix in (".bin", ".idx", ".xxh3"):
        prefix.with_suffix(suffix).unlink(missing_ok=True)
    writer = IndexedWriter(prefix, "uint16")
    for length in lengths:
        writer.add(np.arange(length))
    writer.finish()
    return prefix
