"""The documents of a corpus under other domains: tokens are copied, and splits stay as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Corpus, Domain, DomainSplit, Split
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.artifacts.files import link_or_copy, writing
from megatron_chameleon.corpus.indexed import IndexedWriter, TokenFile, open_tokens
from megatron_chameleon.corpus.shards.folder import TOKENS_NAME
from megatron_chameleon.corpus.text_bytes import document_bytes, token_bytes
from megatron_chameleon.corpus.tokenization.tokenizer import Tokenizer

Labels = Mapping[tuple[str, Split], NDArray[np.integer]]

_BLOCK_DOCUMENTS = 1 << 16
# What all files together may hold before it is written.
_WAITING_BYTES = 1 << 26
_PIECE_TOKENS = 1 << 22


def regroup(
    corpus: Corpus,
    labels: Labels,
    names: Sequence[str],
    tokenizer: Tokenizer,
    folder: Path,
    on_bytes: Callable[[int], object],
) -> dict[str, Domain]:
    """Write the .bin/.idx files of a corpus whose documents belong to other domains.

    Documents of a new domain are in the order of the old domains, and of the documents in them.

    Args:
        corpus: that is read.
        labels: old domain and split -> [num_documents], the position in ``names`` of the domain
            that each document goes to. Domains that are not here stay as they are.
        names: new domains.
        tokenizer: of the corpus.
        folder: where to write; it is there and empty.
        on_bytes: is told how many bytes of tokens were just copied.

    Returns:
        The domains that stay, and the new ones after them.

    Raises:
        UserError: if the corpus is damaged, or the disk is full.
    """
    with writing(folder):
        (folder / TOKENS_NAME).mkdir()
    divided = {name for name, _ in labels}
    assert not (set(corpus.names) - divided) & set(names), "a name is taken"
    kept = {name: _kept(corpus, name, folder) for name in corpus.names if name not in divided}
    sizes = token_bytes(tokenizer)
    parts = [[_Part(folder, corpus, name, split) for name in names] for split in SPLITS]
    for (name, split), targets in labels.items():
        files = parts[SPLITS.index(split)]
        tokens = open_tokens(corpus, name, split)
        text_bytes = document_bytes(tokens, sizes, corpus.domains[name].split(split).text_bytes)
        for first in range(0, len(tokens), _BLOCK_DOCUMENTS):
            block = slice(first, first + _BLOCK_DOCUMENTS)
            _copy(tokens, block, targets[block], text_bytes[block], files, on_bytes)
    made = {
        name: Domain(*(parts[split][number].finish() for split in range(len(SPLITS))))
        for number, name in enumerate(names)
    }
    return {**kept, **made}


class _Part:
    """The files of one split of a new domain, and what is counted while they are written."""

    def __init__(self, folder: Path, corpus: Corpus, domain: str, split: Split) -> None:
        self._prefix = f"{TOKENS_NAME}/{file_name_of(domain)}-{split}"
        self._writer = IndexedWriter(folder / self._prefix, corpus.dtype)
        self._text_bytes = 0

    def add(self, lengths: NDArray[np.int32], text_bytes: int) -> None:
        """Say which documents the tokens that were added make up."""
        self._writer.add_lengths(lengths)
        self._text_bytes += text_bytes

    def add_tokens(self, tokens: NDArray[np.integer]) -> None:
        """Append tokens of documents that are told of by ``add``."""
        self._writer.add_tokens(tokens.tobytes())

    def flush(self) -> None:
        """Write what is in memory."""
        self._writer.flush()

    def finish(self) -> DomainSplit:
        """Close the files and say what is in them."""
        counts = (self._writer.documents, self._writer.tokens, self._text_bytes)
        sha256 = self._writer.finish()
        return DomainSplit(self._prefix, *counts, sha256, self._writer.block_checksums)


def _copy(
    tokens: TokenFile,
    block: slice,
    targets: NDArray[np.integer],
    text_bytes: NDArray[np.int64],
    files: Sequence[_Part],
    on_bytes: Callable[[int], object],
) -> None:
    """Copy a ``block`` of documents to their ``targets``; neighbours of one target at once."""
    lengths = np.array(tokens.lengths[block])
    ends = tokens.starts[block] + lengths
    begins = np.flatnonzero(np.diff(targets, prepend=-1))
    lasts = np.append(begins[1:], len(targets)) - 1
    written = 0
    for begin, last in zip(begins.tolist(), lasts.tolist(), strict=True):
        first, stop = int(ends[begin]) - int(lengths[begin]), int(ends[last])
        for start in range(first, stop, _PIECE_TOKENS):
            piece = tokens.tokens[start : min(start + _PIECE_TOKENS, stop)]
            files[int(targets[begin])].add_tokens(piece)
            on_bytes(piece.nbytes)
            written += piece.nbytes
            if written > _WAITING_BYTES:
                _flush(files)
                written = 0
    for number in np.unique(targets).tolist():
        here = targets == number
        files[number].add(lengths[here], int(text_bytes[here].sum()))
    _flush(files)


def _flush(files: Sequence[_Part]) -> None:
    for part in files:
        part.flush()


def _kept(corpus: Corpus, name: str, folder: Path) -> Domain:
    """A domain that stays as it is: its files get a second name in ``folder``."""
    made = {}
    for split in SPLITS:
        prefix = f"{TOKENS_NAME}/{file_name_of(name)}-{split}"
        part = corpus.domains[name].split(split)
        for suffix in (".bin", ".idx", *([".xxh3"] if part.block_checksums else [])):
            source = Path(f"{corpus.prefix(name, split)}{suffix}")
            link_or_copy(source, folder / f"{prefix}{suffix}")
        made[split] = dataclasses.replace(part, prefix=prefix)
    return Domain(**made)
