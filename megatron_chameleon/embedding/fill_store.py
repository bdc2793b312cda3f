"""Filling an embedding store: every domain that it lacks goes through the proxy once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, EmbeddingRecipe, EmbeddingStore, Stopwatch
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.corpus.indexed import TokenFile, open_tokens
from megatron_chameleon.embedding.extract import embed_windows
from megatron_chameleon.embedding.windows import Windows, draw_windows
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import embedding_flops
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.progress import progress_bar


def open_store(
    folder: Path, recipe: EmbeddingRecipe, hidden_size: int, made: Provenance
) -> EmbeddingStore:
    """The store in ``folder``, or an empty one that is not yet written.

    Raises:
        UserError: if the folder holds vectors made by another recipe.
    """
    if not EmbeddingStore.exists(folder):
        return EmbeddingStore(folder, recipe, hidden_size, {}, made, Cost())
    store = EmbeddingStore.load(folder)
    require_recipe(folder, store.recipe, recipe)
    return store


def require_recipe(folder: Path, there: EmbeddingRecipe, wanted: EmbeddingRecipe) -> None:
    """Raises UserError if the recipe ``there``, of the store in ``folder``, is not ``wanted``."""
    for field, name in (
        ("model_hash", "proxy"),
        ("layer", "layer"),
        ("window_length", "window length"),
        ("num_windows", "number of windows"),
        ("seed", "extraction seed"),
        ("cross_documents", "choice of whether windows cross documents"),
        ("tokenizer_hash", "tokenizer"),
        ("dtype", "data type"),
        ("final_norm", "choice of whether the final norm is applied"),
    ):
        if getattr(there, field) != getattr(wanted, field):
            raise UserError(
                f"{folder} holds embeddings of another {name} "
                f"({getattr(there, field)}, now {getattr(wanted, field)}); "
                "give another --store, or delete this one"
            )


def missing_domains(store: EmbeddingStore, corpus: Corpus, names: Sequence[str]) -> list[str]:
    """Those of the corpus's domains ``names`` that the store lacks, or holds from other text."""
    return [name for name in names if not store.holds(name, corpus.domain_hash(name))]


def fill_store(
    store: EmbeddingStore, corpus: Corpus, reader: Reader, names: list[str], batch_size: int
) -> tuple[EmbeddingStore, Cost]:
    """Embed the domains ``names`` and write them to the store, one after another.

    Every rank calls this; rank 0 writes. A run that is killed keeps the domains it finished.

    Returns:
        The store, which on rank 0 has the domains, and what these cost; others may have added to
        the store's own cost meanwhile.
    """
    layout = reader.layout
    sources = {name: open_tokens(corpus, name, "train") for name in names}
    windows = {name: drawn_windows(store.recipe, name, source) for name, source in sources.items()}
    total, spent = sum(map(len, windows.values())), Cost()
    with progress_bar(total, " windows", quiet=not layout.is_main) as progress:
        for name in names:
            progress.set_description(f"embedding {name}")
            stopwatch = Stopwatch()
            vectors = embed_windows(
                reader,
                sources[name],
                windows[name],
                store.recipe.layer,
                batch_size,
                progress,
                name,
                final_norm=store.recipe.final_norm,
            )
            cost = stopwatch.cost(
                windows_flops(reader.shape, store.recipe.layer, windows[name]), layout.world_size
            )
            spent += cost
            if layout.is_main:
                store = store.with_domain(name, vectors, corpus.domain_hash(name), cost)
    return store, spent


def windows_flops(shape: ModelShape, layer: int, windows: Windows) -> float:
    """FLOPs of embedding ``windows`` by the first ``layer`` layers, over all ranks.

    Windows are of several lengths, and attention costs more per token in the longer ones.
    """
    lengths, counts = np.unique(windows.length, return_counts=True)
    return sum(
        embedding_flops(shape, layer, int(count * length), int(length))
        for length, count in zip(lengths, counts, strict=True)
    )


def drawn_windows(recipe: EmbeddingRecipe, name: str, source: TokenFile) -> Windows:
    """The windows of ``source`` that ``recipe`` draws for a domain called ``name``."""
    windows = draw_windows(
        source.lengths,
        recipe.window_length,
        recipe.num_windows,
        recipe.seed,
        name,
        cross_documents=recipe.cross_documents,
    )
    return windows.longest_first()
