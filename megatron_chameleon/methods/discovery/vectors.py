"""Checked inputs of discovery, and the proxy's vectors of windows and documents in a store.

A document's vector is the mean over a few windows of it. The embedding store holds them in blocks
of documents, so that memory is bounded and an interrupted run loses at most one block.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.artifacts import (
    SPLITS,
    Corpus,
    Cost,
    EmbeddingRecipe,
    EmbeddingStore,
    Split,
    Stopwatch,
    provenance,
)
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.checkpoint.load import open_reader, require_tokenizer, shape_of
from megatron_chameleon.corpus.indexed import TokenFile, open_tokens
from megatron_chameleon.corpus.options import is_domain_name
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.embedding.embed import embed_windows, open_store, windows_flops
from megatron_chameleon.embedding.windows import Windows, draw_windows
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.discovery.options import DiscoverOptions
from megatron_chameleon.methods.output import select_domains
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import Reader, check_layer, check_window
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.progress import progress_bar

# Lost when a run is killed, and in memory at a time: 256 MiB at 4 windows per document and a hidden
# size of 2048.
BLOCK_DOCUMENTS = 8192


@dataclasses.dataclass(frozen=True)
class DocumentBlock:
    """Documents ``first`` to ``stop`` - 1 of a domain's split."""

    domain: str
    split: Split
    first: int
    stop: int

    @property
    def key(self) -> str:
        """The name of their vectors in the store."""
        return f"{self.domain}/{self.split}/{self.first}-{self.stop}"


@dataclasses.dataclass(frozen=True)
class DiscoverPlan:
    """The options with the artifacts that they name, all checked.

    Attributes:
        options: of the tool.
        corpus: to read.
        names: the domains to cluster.
        checkpoint: of the proxy.
        shape: of the proxy.
        recipe: of the embedding store; ``num_windows`` is the maximum per document.
        provenance: of the new corpus.
    """

    options: DiscoverOptions
    corpus: Corpus
    names: list[str]
    checkpoint: CheckpointRecord
    shape: ModelShape
    recipe: EmbeddingRecipe
    provenance: Provenance

    def blocks(self) -> list[DocumentBlock]:
        """The documents to cluster, in the order of the corpus."""
        counts = {
            (name, split): self.corpus.domains[name].split(split).documents
            for name in self.names
            for split in SPLITS
        }
        return [
            DocumentBlock(name, split, first, min(first + BLOCK_DOCUMENTS, count))
            for (name, split), count in counts.items()
            for first in range(0, count, BLOCK_DOCUMENTS)
        ]

    def fit_windows(self, name: str) -> tuple[str, Windows]:
        """Windows of a domain to fit k-means to, and the name of their vectors in the store.

        By its share of the tokens, at least one, so that documents count by their length.
        """
        tokens = self.corpus.train_tokens
        share = tokens[name] / sum(tokens[each] for each in self.names)
        count, seed = max(1, round(self.options.embedding.fit_windows * share)), self.options.seed
        lengths = open_tokens(self.corpus, name, "train").lengths
        windows = draw_windows(lengths, self.recipe.window_length, count, seed, name)
        return f"{name}/windows-{count}-seed{seed}", windows.longest_first()


def plan_discovery(options: DiscoverOptions) -> DiscoverPlan:
    """Load and check what ``options`` name; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    if Corpus.exists(options.output):
        raise UserError(f"{options.output} already holds a corpus; choose another --output")
    corpus = Corpus.load(options.corpus)
    checkpoint = CheckpointRecord.load(find_checkpoint(options.checkpoint))
    require_tokenizer(checkpoint, corpus)
    names = select_domains(options.domains, corpus)
    cluster, most, least = options.cluster_name, options.numbers[-1], options.min_tokens_per_split
    if not is_domain_name(cluster) or not cluster.isprintable() or "," in cluster:
        raise UserError(
            f"--cluster-name {cluster!r}: must be a domain name, on one line and without commas"
        )
    if taken := {*cluster_names(cluster, most, most)}.intersection(corpus.names).difference(names):
        raise UserError(
            f"--cluster-name {cluster}: the corpus keeps a domain '{min(taken)}'; pass another name"
        )
    documents = sum(corpus.domains[name].train.documents for name in names)
    if most > documents:
        raise UserError(
            f"--discover {most}: there are only {documents} training documents; pass fewer clusters"
        )
    for split in SPLITS:
        for name in names:
            lengths = open_tokens(corpus, name, split).lengths
            if len(lengths) and lengths.min() == 0:
                raise UserError(
                    f"{corpus.prefix(name, split)}.idx has a document without tokens, which has no "
                    "embedding; preprocess again"
                )
        tokens = sum(corpus.domains[name].split(split).tokens for name in names)
        if tokens < 2 * least:
            raise UserError(
                f"--min-tokens-per-split {least}: the text to cluster has {tokens} {split} tokens, "
                "too few for two clusters; lower it, or add text"
            )
    corpus_tokenizer(corpus)  # needed at the end: a missing file shows at once
    shape = shape_of(checkpoint)
    embedding = options.embedding
    recipe = EmbeddingRecipe(
        model_hash=checkpoint.hash,
        layer=check_layer(shape, embedding.layer),
        window_length=check_window(shape, embedding.window_length),
        num_windows=embedding.windows_per_document,
        seed=0,  # evenly spaced
        tokenizer_hash=corpus.tokenizer.sha256,
    )
    check_model_layout(shape.size, options.parallel, recipe.window_length)
    inputs = {"corpus": corpus.hash, "checkpoint": checkpoint.hash}
    made = provenance(options, inputs)
    return DiscoverPlan(options, corpus, names, checkpoint, shape, recipe, made)


def cluster_names(name: str, count: int, most: int) -> list[str]:
    """``name-00``, ``name-01`` and so on, with the digits that ``most`` of them need, at least 2.

    Names do not depend on the number of clusters that is chosen after embedding.
    """
    digits = max(2, len(str(most - 1)))
    return [f"{name}-{number:0{digits}d}" for number in range(count)]


def embed_missing(plan: DiscoverPlan, layout: Layout) -> tuple[EmbeddingStore, Cost]:
    """Embed the vectors that the store lacks. Collective; rank 0 writes.

    Returns:
        The store, complete on rank 0, and the cost of the new vectors.

    Raises:
        UserError: if the store has another recipe, the proxy's hidden states are not finite, or the
            disk is full.
    """
    corpus, recipe = plan.corpus, plan.recipe
    layer, batch_size = recipe.layer, plan.options.embedding.embedding_batch_size
    folder, width = plan.options.store_folder, plan.shape.size.hidden_size
    store = from_main(lambda: open_store(folder, recipe, width, plan.provenance))
    # None stands for the windows to fit k-means to.
    missing: list[tuple[str, DocumentBlock | None]] = from_main(
        lambda: [
            (name, block)
            for name, key, block in (
                *((name, plan.fit_windows(name)[0], None) for name in plan.names),
                *((block.domain, block.key, block) for block in plan.blocks()),
            )
            if not store.holds(key, corpus.domain_hash(name))
        ]
    )
    spent = Cost()
    if not missing:
        return store, spent
    reader = open_reader(plan.checkpoint, layout)
    files = {
        key: open_tokens(corpus, *key)
        for key in {(name, block.split if block else "train") for name, block in missing}
    }

    def windows_of(name: str, block: DocumentBlock | None) -> tuple[str, Windows]:
        if block is None:
            return plan.fit_windows(name)
        lengths = files[name, block.split].lengths[block.first : block.stop]
        return block.key, spread_windows(lengths, recipe.window_length, recipe.num_windows)

    total = sum(len(windows_of(*each)[1]) for each in missing)
    with progress_bar(total, " windows", quiet=not layout.is_main) as progress:
        for name, block in missing:
            stopwatch, (key, windows) = Stopwatch(), windows_of(name, block)
            progress.set_description(f"embedding {key}")
            if block is None:
                vectors = embed_windows(
                    reader, files[name, "train"], windows, layer, batch_size, progress, name
                )
            else:
                tokens = files[name, block.split]
                vectors = embed_block(reader, tokens, block, windows, layer, batch_size, progress)
            cost = stopwatch.cost(windows_flops(plan.shape, layer, windows), layout.world_size)
            spent += cost
            if layout.is_main:
                store = store.with_domain(key, vectors, corpus.domain_hash(name), cost)
    return store, spent


def spread_windows(document_lengths: NDArray[np.integer], window_length: int, most: int) -> Windows:
    """At most ``most`` evenly spaced windows of each document; at least one.

    Each document is cut into the fewest windows of nearly equal length that fit, as by
    :func:`draw_windows`. Of p windows, m are taken: those numbered floor((i + 1/2) p / m).

    Args:
        document_lengths: [d] tokens per document, at least 1 each.
        window_length: maximum tokens per window.
        most: windows per document.
    """
    lengths = np.asarray(document_lengths, dtype=np.int64)
    num_windows = -(-lengths // window_length)
    taken = np.minimum(num_windows, most)
    document = np.repeat(np.arange(len(lengths)), taken)
    number = np.arange(len(document)) - np.repeat(np.cumsum(taken) - taken, taken)
    part = (2 * number + 1) * num_windows[document] // (2 * taken[document])
    start = lengths[document] * part // num_windows[document]
    end = lengths[document] * (part + 1) // num_windows[document]
    return Windows(document, start, end - start)


def embed_block(
    reader: Reader,
    tokens: TokenFile,
    block: DocumentBlock,
    windows: Windows,
    layer: int,
    batch_size: int,
    progress: tqdm,
) -> NDArray[np.float32]:
    """The vectors of the documents of ``block``. Collective.

    Args:
        reader: the proxy.
        tokens: of the domain's split.
        block: the documents.
        windows: of these documents, numbered from the first of the block.
        layer: from 1 to num_layers.
        batch_size: windows per forward pass and rank.
        progress: counts windows.

    Returns:
        [stop - first, h] float32: the mean over a document's windows of their vectors.

    Raises:
        UserError: if the proxy's hidden states are not finite, with the domain and the window.
    """
    windows = windows.longest_first()
    in_file = Windows(windows.document + block.first, windows.start, windows.length)
    vectors = embed_windows(reader, tokens, in_file, layer, batch_size, progress, block.domain)
    order = np.argsort(windows.document, kind="stable")
    counts = np.bincount(windows.document, minlength=block.stop - block.first)
    sums = np.add.reduceat(vectors[order], np.cumsum(counts) - counts, axis=0, dtype=np.float64)
    return (sums / counts[:, None]).astype(np.float32)
