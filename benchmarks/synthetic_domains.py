"""Domains of random tokens in Megatron's .bin/.idx format, for benchmarks of reading them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_chameleon.artifacts import TokenizerIdentity
from megatron_chameleon.corpus.indexed import IndexedWriter

VOCAB_SIZE, EOD = 50_257, 50_256
IDENTITY = TokenizerIdentity("tokenizers", "tokenizer.json", "0" * 64, VOCAB_SIZE, EOD)


def write_domains(
    folder: Path, num_domains: int, num_documents: int, median_length: int = 400
) -> list[Path]:
    """Write ``num_documents`` documents in ``num_domains`` domains; returns their prefixes.

    Lengths are log-normal, approximately as in web text; sizes of domains differ by up to 4 times.
    """
    rng = np.random.default_rng(0)
    shares = np.linspace(1.0, 4.0, num_domains)
    counts = np.floor(shares / shares.sum() * num_documents).astype(int)
    counts[-1] += num_documents - counts.sum()
    prefixes = []
    for number, count in enumerate(counts.tolist()):
        prefix = folder / f"domain{number}"
        writer = IndexedWriter(prefix, "uint16")
        lengths = np.clip(rng.lognormal(np.log(median_length), 1.0, count), 2, 20_000).astype(int)
        tokens = rng.integers(0, EOD, lengths.sum(), dtype=np.uint16)
        tokens[np.cumsum(lengths) - 1] = EOD
        writer.add_tokens(tokens.tobytes())
        writer.add_lengths(lengths.astype(np.int32))
        writer.finish()
        prefixes.append(prefix)
    return prefixes


def data_path_of(prefixes: list[Path]) -> str:
    """A --data-path over ``prefixes``, with random weights of a fixed seed."""
    weights = np.random.default_rng(1).dirichlet(np.ones(len(prefixes)))
    return " ".join(f"{weight} {prefix}" for weight, prefix in zip(weights, prefixes, strict=True))


@dataclasses.dataclass(frozen=True)
class _Tokenizer:
    """The tokenizer attributes that Megatron's datasets read."""

    eod: int = EOD
    vocab_size: int = VOCAB_SIZE

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def megatron_dataset(data_path: str, num_samples: int, seq_length: int, cache: Path) -> Any:
    """The train split of ``data_path`` by Megatron's own BlendedMegatronDatasetBuilder."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=seq_length,
        blend=get_blend_from_list(data_path.split()),
        split="1",
        path_to_cache=str(cache),
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [num_samples, 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


@contextlib.contextmanager
def one_process_group() -> Iterator[None]:
    """A process group of one process, which Megatron's blended dataset requires."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
