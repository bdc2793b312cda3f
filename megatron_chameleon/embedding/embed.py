"""Embed windows of text with a proxy, and fill an embedding store entry by entry."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.artifacts import (
    Cost,
    EmbeddingRecipe,
    EmbeddingStore,
    Split,
    Stopwatch,
)
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.blend.sampler import Batch, no_embedding, read_ahead
from megatron_chameleon.corpus.domains import Domains, RawText
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.corpus.windows import Windows, draw_windows, spread_windows
from megatron_chameleon.embedding.pooling import FinalNorm, masked_mean
from megatron_chameleon.embedding.proxy import ProxyReader
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.readout import length_multiple, padded_length
from megatron_chameleon.parallel.layout import from_main
from megatron_chameleon.progress import progress_bar


def embed_windows(
    reader: ProxyReader,
    tokens: TokenFile,
    windows: Windows,
    layer: int,
    batch_size: int,
    progress: tqdm,
    name: str,
    *,
    final_norm: bool = False,
) -> NDArray[np.float32]:
    """Embed each window as the mean, over its tokens, of the hidden states after ``layer`` layers.

    Collective: batches are assigned to data-parallel ranks in turn. The result does not depend on
    the layout.

    Args:
        reader: reader of the hidden states of the proxy.
        tokens: the domain's documents.
        windows: token ranges of these documents.
        layer: number of the layer whose output is averaged, from 1 to num_layers.
        batch_size: windows per forward pass and rank.
        progress: progress bar that counts windows.
        name: the domain, for messages.
        final_norm: apply the model's final norm to the hidden states first.

    Returns:
        [n, h] float32, row i for window i, on every rank.

    Raises:
        UserError: if hidden states are not finite; the message names the domain and the window.
    """
    layout = reader.layout
    vectors = torch.zeros(len(windows), reader.hidden_size, device=layout.device)
    norm = None
    if final_norm:
        values, epsilon = reader.final_norm()
        norm = FinalNorm(*values, epsilon=epsilon)
    has_states = False  # True on the pipeline stage that computes the layer's hidden states
    firsts = range(0, len(windows), batch_size)
    batches = [range(first, min(first + batch_size, len(windows))) for first in firsts]
    own = batches[layout.data_rank :: layout.data_size]
    padded = (_padded(reader, tokens, windows, rows, name) for rows in own)
    with read_ahead(padded, layout.device) as ahead:
        for number, rows in enumerate(batches):
            progress.update(len(rows))
            if number % layout.data_size != layout.data_rank:
                continue
            batch = next(ahead)
            hidden = reader.hidden_states(batch["tokens"], layer, batch["lengths"])
            if hidden is not None:
                has_states = True
                means = masked_mean(hidden, batch["lengths"], norm)
                vectors[rows.start : rows.stop] = means
    result: NDArray[np.float32] = (
        reader.sum_over_ranks(vectors, has_result=has_states).cpu().numpy()
    )
    broken = np.flatnonzero(~np.isfinite(result).all(axis=1))
    if broken.size:
        first = broken[np.lexsort((windows.start[broken], windows.document[broken]))[0]]
        start, length = int(windows.start[first]), int(windows.length[first])
        raise UserError(
            f"domain '{name}': hidden states after layer {layer} are not finite in {broken.size} "
            f"of {len(windows)} windows (first: tokens {start} to {start + length - 1} of document "
            f"{int(windows.document[first])}, counted from 0); the proxy has diverged: use an "
            "earlier checkpoint or a lower learning rate"
        )
    return result


def _padded(
    reader: ProxyReader, tokens: TokenFile, windows: Windows, rows: range, name: str
) -> Batch:
    """Return tokens [b, s], padded with zeros at the end, and lengths [b].

    Raises:
        UserError: for a token that the proxy has no embedding for.
    """
    batch_rows = slice(rows.start, rows.stop)
    lengths = windows.length[batch_rows]
    multiple, longest = length_multiple(reader.layout), reader.max_sequence_length
    width = min(padded_length(int(lengths.max()), multiple), longest)
    batch = np.zeros((len(rows), width), dtype=np.int64)
    firsts = tokens.starts[windows.document[batch_rows]] + windows.start[batch_rows]
    for row, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
        batch[row, :length] = tokens.tokens[first : first + length]
    if (largest := int(batch.max())) >= reader.num_embeddings:
        document = int(windows.document[rows.start + batch.max(axis=1).argmax()])
        where = f" in document {document} of domain '{name}', counted from 0,"
        raise UserError(no_embedding(largest, reader.num_embeddings, where))
    return {"tokens": torch.from_numpy(batch), "lengths": torch.from_numpy(lengths)}


def windows_flops(reader: ProxyReader, layer: int, windows: Windows) -> float:
    """Count the FLOPs of embedding ``windows`` with the first ``layer`` layers, over all ranks.

    Each window length is counted separately, since attention costs more per token in longer
    windows.
    """
    lengths, counts = np.unique(windows.length, return_counts=True)
    return sum(
        reader.embedding_flops(layer, int(count * length), int(length))
        for length, count in zip(lengths, counts, strict=True)
    )


def sample_windows(recipe: EmbeddingRecipe, name: str, tokens: TokenFile) -> Windows:
    """Sample the windows of the domain ``name`` by ``recipe``, longest first."""
    windows = draw_windows(
        tokens.lengths,
        recipe.window_length,
        recipe.num_windows,
        recipe.seed,
        name,
        within_documents=not recipe.cross_documents,
    )
    return windows.longest_first()


def embed_by_recipe(
    reader: ProxyReader,
    tokens: TokenFile,
    windows: Windows,
    recipe: EmbeddingRecipe,
    batch_size: int,
    progress: tqdm,
    name: str,
) -> tuple[NDArray[np.float32], Cost]:
    """Call :func:`embed_windows` with the layer and norm of ``recipe``; return vectors and cost."""
    stopwatch, norm = Stopwatch(), recipe.final_norm
    vectors = embed_windows(
        reader, tokens, windows, recipe.layer, batch_size, progress, name, final_norm=norm
    )
    flops = windows_flops(reader, recipe.layer, windows)
    return vectors, stopwatch.cost(flops, reader.layout.world_size)


def open_store(
    folder: Path, recipe: EmbeddingRecipe, hidden_size: int, made: Provenance
) -> EmbeddingStore:
    """Open the store in ``folder``, or return an empty store that is not yet on disk.

    Raises:
        UserError: if the folder holds vectors of another recipe.
    """
    if not EmbeddingStore.exists(folder):
        return EmbeddingStore(folder, recipe, hidden_size, {}, made, Cost())
    store = EmbeddingStore.load(folder)
    store.require_recipe(recipe)
    return store


@dataclasses.dataclass(frozen=True)
class StoreEntry:
    """A group of vectors of a store: one vector per sampled window, or one per document.

    Attributes:
        key: name of the vectors in the store.
        domain: domain whose text is embedded.
        recipe: recipe of the windows; with ``documents``, ``num_windows`` is the maximum per
            document.
        split: split of the text.
        documents: documents to embed, each by the mean of its windows' vectors; if empty, windows
            of the whole text are sampled.
    """

    key: str
    domain: str
    recipe: EmbeddingRecipe
    split: Split = "train"
    documents: range = range(0)

    def windows(self, tokens: TokenFile) -> Windows:
        """The windows to embed, in the token file of ``domain`` and ``split``."""
        if not self.documents:
            return sample_windows(self.recipe, self.domain, tokens)
        first = self.documents.start
        lengths = tokens.lengths[first : self.documents.stop]
        windows = spread_windows(lengths, self.recipe.window_length, self.recipe.num_windows)
        return dataclasses.replace(windows, document=windows.document + first).longest_first()


def missing_entries(
    store: EmbeddingStore, text: Domains | RawText, entries: Sequence[StoreEntry]
) -> list[StoreEntry]:
    """List the ``entries`` that are missing in the store or were computed from other text."""
    return [each for each in entries if not store.holds(each.key, text.domain_hash(each.domain))]


def fill_store(
    store: EmbeddingStore,
    text: Domains | RawText,
    reader: ProxyReader,
    entries: Sequence[StoreEntry],
    batch_size: int,
) -> tuple[EmbeddingStore, Cost]:
    """Embed ``entries`` and write each to the store when it is finished.

    Collective; rank 0 writes. An interrupted run keeps the finished entries.

    Returns:
        The store, which includes the entries on rank 0 only, and the cost of the entries. The cost
        of the store may also include vectors that other processes embedded in the meantime.
    """
    is_main = reader.layout.is_main

    @functools.lru_cache(maxsize=1)  # several entries in a row may have the same file
    def tokens_of(name: str, split: Split) -> TokenFile:
        read = functools.partial(text.open, name, split)
        return from_main(read) if text.is_raw else read()

    spent = Cost()
    if text.is_raw:
        total = sum(entry.recipe.num_windows for entry in entries)  # corrected below
    else:
        total = sum(len(entry.windows(tokens_of(entry.domain, entry.split))) for entry in entries)
    with progress_bar(total, " windows", quiet=not is_main) as progress:
        for entry in entries:
            progress.set_description(f"embedding {entry.key}")
            tokens = tokens_of(entry.domain, entry.split)
            windows = entry.windows(tokens)  # the windows of all entries may not fit in memory
            counted = entry.recipe.num_windows if text.is_raw else len(windows)
            if text.is_reencoded:
                by_document = bool(entry.documents)
                if entry.recipe.cross_documents:
                    # Enough text for as many windows, even if it has fewer tokens of the proxy.
                    more = dataclasses.replace(entry.recipe, num_windows=2 * len(windows))
                    windows = sample_windows(more, entry.domain, tokens)
                encode = functools.partial(text.encode_again, by_document=by_document)
                tokens = from_main(functools.partial(encode, tokens, windows))
                in_memory = range(len(tokens)) if by_document else range(0)
                windows = dataclasses.replace(entry, documents=in_memory).windows(tokens)
            progress.total += len(windows) - counted
            vectors, cost = embed_by_recipe(
                reader, tokens, windows, store.recipe, batch_size, progress, entry.domain
            )
            if entry.documents:
                vectors = document_means(vectors, windows.document)
            spent += cost
            if is_main:
                text_hash = text.domain_hash(entry.domain)
                tokens_embedded = int(windows.length.sum())
                store = store.write_domain(entry.key, vectors, tokens_embedded, text_hash, cost)
    return store, spent


def document_means(
    vectors: NDArray[np.float32], document: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Average the vectors of each document's windows; return [d, h] float32.

    Args:
        vectors: [n, h] vector of each window.
        document: [n] document of each window.
    """
    order = np.argsort(document, kind="stable")
    counts = np.unique(document, return_counts=True)[1]
    sums = np.add.reduceat(vectors[order], np.cumsum(counts) - counts, axis=0, dtype=np.float64)
    means: NDArray[np.float32] = (sums / counts[:, None]).astype(np.float32)
    return means
