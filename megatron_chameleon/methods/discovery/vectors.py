"""Checked inputs of discovery, and the proxy's vectors of windows and documents on disk.

A document's vector is the mean over a few windows of it. Vectors are stored in blocks of documents,
so that memory is bounded and an interrupted run loses at most one block.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.artifacts import SPLITS, Corpus, Cost, Split, Stopwatch, provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.artifacts.files import replacing, require_regular_file, sha256_of_json
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.checkpoint.load import open_reader, require_tokenizer, shape_of
from megatron_chameleon.corpus.indexed import TokenFile, open_tokens
from megatron_chameleon.corpus.options import is_domain_name
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.embedding.embed import embed_windows, windows_flops
from megatron_chameleon.embedding.windows import Windows, draw_windows
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.discovery.options import DiscoverOptions
from megatron_chameleon.methods.domains import select_domains
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import Reader, check_layer, check_window
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.progress import progress_bar

# Lost when a run is killed, and in memory at a time: 256 MiB at 4 windows per document and a hidden
# size of 2048.
BLOCK_DOCUMENTS = 8192
_HASH_CHARACTERS = 16
_CHECKSUM_BYTES = 8
# Part of the folders' names: vectors of an earlier release, without a checksum, are not read.
_FORMAT = "npy+xxh3"


@dataclasses.dataclass(frozen=True)
class DocumentRecipe:
    """What a document's vector depends on, besides its text.

    Attributes:
        model_hash: of the proxy's weights.
        layer: hidden states after this many transformer layers, before the final layer norm.
        window_length: maximum tokens per window.
        windows_per_document: maximum windows per document.
    """

    model_hash: str
    layer: int
    window_length: int
    windows_per_document: int


@dataclasses.dataclass(frozen=True)
class DocumentBlock:
    """Documents ``first`` to ``stop`` - 1 of a domain's split."""

    domain: str
    split: Split
    first: int
    stop: int


@dataclasses.dataclass(frozen=True)
class DocumentVectors:
    """The vectors of a corpus's documents in ``folder``, which may hold those of others too.

    The folder name of a domain contains the hash of its text and of the recipe, so that vectors of
    other text or by another proxy are never read instead.
    """

    folder: Path
    corpus: Corpus
    recipe: DocumentRecipe
    hidden_size: int

    def blocks(self, domain: str, split: Split) -> Iterator[DocumentBlock]:
        """The blocks of one split of a domain, in order."""
        documents = self.corpus.domains[domain].split(split).documents
        for first in range(0, documents, BLOCK_DOCUMENTS):
            yield DocumentBlock(domain, split, first, min(first + BLOCK_DOCUMENTS, documents))

    def path(self, block: DocumentBlock) -> Path:
        """The file of the vectors of ``block``."""
        return self.domain_folder(block.domain) / f"{block.split}-{block.first:010d}.npy"

    def domain_folder(self, domain: str) -> Path:
        """The folder of all vectors of a domain."""
        made_from = [self.corpus.domain_hash(domain), dataclasses.asdict(self.recipe), _FORMAT]
        digest = sha256_of_json(made_from)[:_HASH_CHARACTERS]
        return self.folder / f"{file_name_of(domain)}-{digest}"

    def write(self, block: DocumentBlock, vectors: NDArray[np.float32]) -> None:
        """Write the ``vectors`` [stop - first, h] of ``block``."""
        write_vectors(self.path(block), vectors)

    def read(self, block: DocumentBlock) -> NDArray[np.float32]:
        """The vectors of ``block``, [stop - first, h] float32.

        Raises:
            UserError: if the file is damaged.
        """
        return read_vectors(self.path(block), block.stop - block.first, self.hidden_size)


def write_vectors(path: Path, vectors: NDArray[np.float32]) -> None:
    """Write ``vectors`` to ``path`` atomically, followed by their XXH3 checksum."""
    with io.BytesIO() as stream:
        np.save(stream, np.ascontiguousarray(vectors, dtype=np.float32))
        content = stream.getvalue()
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.write(xxhash.xxh3_64_digest(content))


def read_vectors(path: Path, rows: int, width: int) -> NDArray[np.float32]:
    """Vectors written by :func:`write_vectors`, [rows, width] float32.

    Raises:
        UserError: if the file is damaged, or has another shape.
    """
    try:
        require_regular_file(path)
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path} ({error}); delete it and run again") from error
    content, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(content) != checksum:
        raise UserError(f"{path} does not match its checksum; delete it and run again")
    vectors: NDArray[np.float32] = np.load(io.BytesIO(content), allow_pickle=False)
    if vectors.shape != (rows, width):
        raise UserError(
            f"{path} holds vectors of shape {vectors.shape}, not {(rows, width)}; delete it and "
            "run again"
        )
    return vectors


@dataclasses.dataclass(frozen=True)
class DiscoverPlan:
    """The options with the artifacts that they name, all checked."""

    options: DiscoverOptions
    corpus: Corpus
    names: list[str]
    """The domains to cluster."""
    checkpoint: CheckpointRecord
    shape: ModelShape
    vectors: DocumentVectors
    provenance: Provenance

    def blocks(self, split: str | None = None) -> list[DocumentBlock]:
        """The blocks of documents to cluster, of one split or of all."""
        return [
            block
            for name in self.names
            for each in SPLITS
            if split in (each, None)
            for block in self.vectors.blocks(name, each)
        ]


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
    _check_names(options, corpus, names)
    _check_text(options, corpus, names)
    corpus_tokenizer(corpus)  # needed at the end: a missing file shows at once
    shape = shape_of(checkpoint)
    embedding = options.embedding
    recipe = DocumentRecipe(
        model_hash=checkpoint.hash,
        layer=check_layer(shape, embedding.layer),
        window_length=check_window(shape, embedding.window_length),
        windows_per_document=embedding.windows_per_document,
    )
    check_model_layout(shape.size, options.parallel, recipe.window_length)
    store = options.store or options.output.with_name(f"{options.output.name}.embeddings")
    inputs = {"corpus": corpus.hash, "checkpoint": checkpoint.hash}
    return DiscoverPlan(
        options=options,
        corpus=corpus,
        names=names,
        checkpoint=checkpoint,
        shape=shape,
        vectors=DocumentVectors(store, corpus, recipe, shape.size.hidden_size),
        provenance=provenance(options, inputs),
    )


def _check_names(options: DiscoverOptions, corpus: Corpus, names: list[str]) -> None:
    name, most = options.cluster_name, options.numbers[-1]
    if not is_domain_name(name) or not name.isprintable() or "," in name:
        raise UserError(
            f"--cluster-name {name!r}: must be a domain name, on one line and without commas"
        )
    new = set(cluster_names(name, most, most))
    taken = [each for each in corpus.names if each in new and each not in names]
    if taken:
        raise UserError(
            f"--cluster-name {name}: the corpus keeps a domain '{taken[0]}'; pass another name"
        )


def cluster_names(name: str, count: int, most: int) -> list[str]:
    """``name-00``, ``name-01`` and so on, with the digits that ``most`` of them need, at least 2.

    Names do not depend on the number of clusters that is chosen after embedding.
    """
    digits = max(2, len(str(most - 1)))
    return [f"{name}-{number:0{digits}d}" for number in range(count)]


def _check_text(options: DiscoverOptions, corpus: Corpus, names: list[str]) -> None:
    """Every cluster can have a document, every document a window, two clusters enough tokens."""
    documents = sum(corpus.domains[name].train.documents for name in names)
    if options.numbers[-1] > documents:
        raise UserError(
            f"--discover {options.numbers[-1]}: there are only {documents} training documents; "
            "pass fewer clusters"
        )
    least = options.min_tokens_per_split
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


def embed_missing(plan: DiscoverPlan, layout: Layout) -> Cost:
    """Embed the vectors that the store lacks; return the cost. Collective; rank 0 writes.

    Raises:
        UserError: if the proxy's hidden states are not finite, or the disk is full.
    """
    domains, blocks = from_main(
        lambda: (
            [name for name in plan.names if not _fit_path(plan, name).is_file()],
            [block for block in plan.blocks() if not plan.vectors.path(block).is_file()],
        )
    )
    if not (domains or blocks):
        return Cost()
    stopwatch, flops = Stopwatch(), 0.0
    reader = open_reader(plan.checkpoint, layout)
    layer, batch_size = plan.vectors.recipe.layer, plan.options.embedding.embedding_batch_size
    total = sum(len(_fit_windows(plan, name)) for name in domains)
    total += sum(len(_block_windows(plan, tokens, block)) for tokens, block in _open(plan, blocks))
    with progress_bar(total, " windows", quiet=not layout.is_main) as progress:
        for name in domains:
            progress.set_description(f"embedding {name}, windows to fit to")
            windows = _fit_windows(plan, name)
            tokens = open_tokens(plan.corpus, name, "train")
            vectors = embed_windows(reader, tokens, windows, layer, batch_size, progress, name)
            flops += windows_flops(plan.shape, layer, windows)
            if layout.is_main:
                write_vectors(_fit_path(plan, name), vectors)
        for tokens, block in _open(plan, blocks):
            progress.set_description(f"embedding {block.domain}, {block.split}")
            windows = _block_windows(plan, tokens, block)
            vectors = embed_block(reader, tokens, block, windows, layer, batch_size, progress)
            flops += windows_flops(plan.shape, layer, windows)
            if layout.is_main:
                plan.vectors.write(block, vectors)
    return stopwatch.cost(flops, layout.world_size)


def fit_vectors(plan: DiscoverPlan) -> NDArray[np.float32]:
    """The window vectors [n, h] to fit k-means to, of all domains.

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


def _open(
    plan: DiscoverPlan, blocks: Sequence[DocumentBlock]
) -> Iterator[tuple[TokenFile, DocumentBlock]]:
    """Each block with its tokens. A file is opened and checked once for all its blocks."""
    for (name, split), together in itertools.groupby(blocks, lambda b: (b.domain, b.split)):
        tokens = open_tokens(plan.corpus, name, split)
        for block in together:
            yield tokens, block


def _fit_count(plan: DiscoverPlan, name: str) -> int:
    """Windows of a domain to fit to: by its share of the tokens, at least one."""
    tokens = plan.corpus.train_tokens
    share = tokens[name] / sum(tokens[each] for each in plan.names)
    return max(1, round(plan.options.embedding.fit_windows * share))


def _fit_windows(plan: DiscoverPlan, name: str) -> Windows:
    """Windows sampled from a domain's training text, so that documents count by their length."""
    lengths = open_tokens(plan.corpus, name, "train").lengths
    length = plan.vectors.recipe.window_length
    drawn = draw_windows(lengths, length, _fit_count(plan, name), plan.options.seed, name)
    return drawn.longest_first()


def _fit_path(plan: DiscoverPlan, name: str) -> Path:
    file = f"windows-{_fit_count(plan, name)}-seed{plan.options.seed}.npy"
    return plan.vectors.domain_folder(name) / file


def _block_windows(plan: DiscoverPlan, tokens: TokenFile, block: DocumentBlock) -> Windows:
    """Windows of the documents of ``block``, numbered from its first one."""
    recipe = plan.vectors.recipe
    lengths = tokens.lengths[block.first : block.stop]
    return spread_windows(lengths, recipe.window_length, recipe.windows_per_document)


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
    pieces = -(-lengths // window_length)
    taken = np.minimum(pieces, most)
    document = np.repeat(np.arange(len(lengths)), taken)
    number = np.arange(len(document)) - np.repeat(np.cumsum(taken) - taken, taken)
    part = (2 * number + 1) * pieces[document] // (2 * taken[document])
    start = lengths[document] * part // pieces[document]
    end = lengths[document] * (part + 1) // pieces[document]
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
