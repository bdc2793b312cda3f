"""One vector a document: the mean over a few windows of it, kept on disk block by block."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.artifacts import Corpus, Split
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.artifacts.files import replacing, require_regular_file, sha256_of_json
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.embedding.extract import embed_windows
from megatron_chameleon.embedding.windows import Windows
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.readout import Reader

# What is lost when a run is killed, and what is in memory at a time: at 4 windows a document and a
# hidden size of 2048, 256 MiB.
BLOCK_DOCUMENTS = 8192
_HASH_CHARACTERS = 16
_CHECKSUM_BYTES = 8
# Part of the folders' names: vectors of an earlier release, without a checksum, are not read.
_FORMAT = "npy+xxh3"


@dataclasses.dataclass(frozen=True)
class DocumentRecipe:
    """What a document's vector depends on, beside its text.

    Attributes:
        model_hash: of the proxy's weights.
        layer: hidden states after this many transformer layers, before the final layer norm.
        window_length: tokens in a window, at most.
        windows_per_document: windows of a document, at most.
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

    The name of what is made of a domain has the hash of its text and of the recipe in it: vectors
    of other text, or by another proxy, are never taken for these.
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
        """Where the vectors of ``block`` are, or will be."""
        return self.domain_folder(block.domain) / f"{block.split}-{block.first:010d}.npy"

    def domain_folder(self, domain: str) -> Path:
        """Where everything that is embedded of a domain lies."""
        made_from = [self.corpus.domain_hash(domain), dataclasses.asdict(self.recipe), _FORMAT]
        return (
            self.folder / f"{file_name_of(domain)}-{sha256_of_json(made_from)[:_HASH_CHARACTERS]}"
        )

    def write(self, block: DocumentBlock, vectors: NDArray[np.float32]) -> None:
        """Keep the ``vectors`` [stop - first, h] of ``block``."""
        write_vectors(self.path(block), vectors)

    def read(self, block: DocumentBlock) -> NDArray[np.float32]:
        """The vectors of ``block``, [stop - first, h] float32.

        Raises:
            UserError: if the file is damaged.
        """
        return read_vectors(self.path(block), block.stop - block.first, self.hidden_size)


def write_vectors(path: Path, vectors: NDArray[np.float32]) -> None:
    """Write ``vectors`` to ``path``, atomically, and the XXH3 checksum of the file at its end."""
    with io.BytesIO() as stream:
        np.save(stream, np.ascontiguousarray(vectors, dtype=np.float32))
        content = stream.getvalue()
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.write(xxhash.xxh3_64_digest(content))


def read_vectors(path: Path, rows: int, width: int) -> NDArray[np.float32]:
    """What :func:`write_vectors` wrote, [rows, width].

    Raises:
        UserError: if the file is damaged, or holds another number of vectors.
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


def spread_windows(document_lengths: NDArray[np.integer], window_length: int, most: int) -> Windows:
    """At most ``most`` windows of each document, spread evenly over it; at least one.

    Every document is cut into the fewest windows of nearly equal length that fit, as by
    :func:`draw_windows`. Of p windows, m are taken: those numbered floor((i + 1/2) p / m).

    Args:
        document_lengths: [d] tokens per document, each 1 or more.
        window_length: tokens per window, at most.
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
    """The vectors of the documents of ``block``. Every rank calls this.

    Args:
        reader: the proxy.
        tokens: those of the domain's split.
        block: of which documents.
        windows: of these documents, which are counted from the first of the block.
        layer: from 1 to num_layers.
        batch_size: windows per forward pass and rank.
        progress: a bar that counts windows.

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
