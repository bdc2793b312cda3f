"""Inputs of blends: difficult weights, .bin/.idx pairs, and options of Megatron's data sets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from numpy.typing import NDArray

from megatron_chameleon.artifacts import TokenizerIdentity
from megatron_chameleon.corpus.indexed import IndexedWriter

Weights = NDArray[np.float64]


def hard_weights(num_domains: int) -> list[Weights]:
    """Difficult weights [num_domains], some of which the trainer rejects."""
    rng = np.random.default_rng([0, num_domains])
    even = rng.dirichlet(np.ones(num_domains))
    rare, very_rare, some_zero = even.copy(), even.copy(), even.copy()
    half = max(1, num_domains // 2)
    rare[:half] = 10.0 ** -rng.uniform(3, 7, half)
    very_rare[-half:] = 1e-12
    some_zero[:-1:3] = 0.0
    concentrated = rng.dirichlet(np.full(num_domains, 0.05))
    powers_of_two = 0.5 ** np.minimum(np.arange(1.0, num_domains + 1), num_domains - 1)
    some_negative = np.where(np.arange(num_domains) % 3 == 0, -even, even)
    normalized = [w / w.sum() for w in (rare, very_rare, some_zero)]
    equal = [np.full(num_domains, value) for value in (1 / num_domains, 0.0, 1e-12, 5e-324)]
    sums = [2 * even, even / 2, -even]
    return [even, concentrated, powers_of_two, some_negative, *normalized, *equal, *sums]


@dataclasses.dataclass(frozen=True)
class MegatronTokenizer:
    """A tokenizer with only the attributes that Megatron's datasets read."""

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
