"""The proxy's part of discovering domains: windows to fit to, and a vector for every document."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.artifacts import SPLITS, Cost, Stopwatch
from megatron_chameleon.checkpoint.reader import open_reader
from megatron_chameleon.corpus.indexed import TokenFile, open_tokens
from megatron_chameleon.embedding.documents import (
    DocumentBlock,
    embed_block,
    read_vectors,
    spread_windows,
    write_vectors,
)
from megatron_chameleon.embedding.extract import embed_windows
from megatron_chameleon.embedding.fill_store import windows_flops
from megatron_chameleon.embedding.windows import Windows, draw_windows
from megatron_chameleon.methods.discovery.plan import DiscoverPlan
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.progress import progress_bar


@dataclasses.dataclass(frozen=True)
class _Missing:
    """What the store lacks: domains whose windows to fit to, and blocks of documents."""

    domains: list[str]
    blocks: list[DocumentBlock]


def embed_missing(plan: DiscoverPlan, layout: Layout) -> Cost:
    """Embed what the store lacks; return what that cost. Every rank calls this; rank 0 writes.

    Raises:
        UserError: if the proxy's hidden states are not finite, or the disk is full.
    """
    missing = from_main(lambda: _missing(plan))
    if not (missing.domains or missing.blocks):
        return Cost()
    stopwatch, flops = Stopwatch(), 0.0
    reader = open_reader(plan.checkpoint, layout)
    recipe = plan.vectors.recipe
    with progress_bar(_total(plan, missing), " windows", quiet=not layout.is_main) as progress:
        for name in missing.domains:
            windows = _fit_windows(plan, name)
            vectors = _embed_fit_windows(plan, reader, name, windows, progress)
            flops += windows_flops(plan.shape, recipe.layer, windows)
            if layout.is_main:
                write_vectors(_fit_path(plan, name), vectors)
        for tokens, block in _opened(plan, missing.blocks):
            progress.set_description(f"embedding {block.domain}, {block.split}")
            windows = _block_windows(plan, tokens, block)
            batch_size = plan.options.embedding.embedding_batch_size
            vectors = embed_block(
                reader, tokens, block, windows, recipe.layer, batch_size, progress
            )
            flops += windows_flops(plan.shape, recipe.layer, windows)
            if layout.is_main:
                plan.vectors.write(block, vectors)
    return stopwatch.cost(flops, layout.world_size)


def fit_vectors(plan: DiscoverPlan) -> NDArray[np.float32]:
    """The window vectors [n, h] that k-means is fitted to, of all domains that are divided.

    Raises:
        UserError: if a file of the store is damaged.
    """
    width = plan.vectors.hidden_size
    return np.concatenate(
        [
            read_vectors(_fit_path(plan, name), len(_fit_windows(plan, name)), width)
            for name in plan.names
        ]
    )


def all_blocks(plan: DiscoverPlan, split: str | None = None) -> list[DocumentBlock]:
    """The blocks of documents that are divided, of one split or of all."""
    return [
        block
        for name in plan.names
        for each in SPLITS
        if split in (each, None)
        for block in plan.vectors.blocks(name, each)
    ]


def _missing(plan: DiscoverPlan) -> _Missing:
    return _Missing(
        [name for name in plan.names if not _fit_path(plan, name).is_file()],
        [block for block in all_blocks(plan) if not plan.vectors.path(block).is_file()],
    )


def _total(plan: DiscoverPlan, missing: _Missing) -> int:
    """Windows that are to be embedded."""
    to_fit = sum(len(_fit_windows(plan, name)) for name in missing.domains)
    return to_fit + sum(
        len(_block_windows(plan, tokens, block)) for tokens, block in _opened(plan, missing.blocks)
    )


def _opened(
    plan: DiscoverPlan, blocks: Sequence[DocumentBlock]
) -> Iterator[tuple[TokenFile, DocumentBlock]]:
    """Each block with its tokens. A file is opened, which checks it, once for all its blocks."""
    for (name, split), together in itertools.groupby(blocks, lambda b: (b.domain, b.split)):
        tokens = open_tokens(plan.corpus, name, split)
        for block in together:
            yield tokens, block


def _fit_count(plan: DiscoverPlan, name: str) -> int:
    """Windows of a domain that are fitted to: its share of the text, at least one."""
    tokens = plan.corpus.train_tokens
    share = tokens[name] / sum(tokens[each] for each in plan.names)
    return max(1, round(plan.options.embedding.fit_windows * share))


def _fit_windows(plan: DiscoverPlan, name: str) -> Windows:
    """Drawn from a domain's training text, so that long documents count by their length."""
    lengths = open_tokens(plan.corpus, name, "train").lengths
    length = plan.vectors.recipe.window_length
    drawn = draw_windows(lengths, length, _fit_count(plan, name), plan.options.seed, name)
    return drawn.longest_first()


def _fit_path(plan: DiscoverPlan, name: str) -> Path:
    file = f"windows-{_fit_count(plan, name)}-seed{plan.options.seed}.npy"
    return plan.vectors.domain_folder(name) / file


def _embed_fit_windows(
    plan: DiscoverPlan, reader: Reader, name: str, windows: Windows, progress: tqdm
) -> NDArray[np.float32]:
    progress.set_description(f"embedding {name}, windows to fit to")
    return embed_windows(
        reader,
        open_tokens(plan.corpus, name, "train"),
        windows,
        plan.vectors.recipe.layer,
        plan.options.embedding.embedding_batch_size,
        progress,
        name,
    )


def _block_windows(plan: DiscoverPlan, tokens: TokenFile, block: DocumentBlock) -> Windows:
    """Windows of the documents of ``block``, counted from its first one."""
    recipe = plan.vectors.recipe
    lengths = tokens.lengths[block.first : block.stop]
    return spread_windows(lengths, recipe.window_length, recipe.windows_per_document)
