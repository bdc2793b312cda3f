"""Write the documents of a corpus under other domains: tokens are copied, splits stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Corpus, Domain, Split
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.artifacts.files import link_or_copy, writing
from megatron_chameleon.corpus.indexed import TokenFile, open_tokens
from megatron_chameleon.corpus.join import CorpusWriter
from megatron_chameleon.corpus.staging import TOKENS_NAME
from megatron_chameleon.corpus.tokenizer import Tokenizer

Labels = Mapping[tuple[str, Split], NDArray[np.integer]]

_BLOCK_DOCUMENTS = 1 << 16
_BLOCK_TOKENS = 1 << 22
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def regroup(
    corpus: Corpus,
    labels: Labels,
    names: Sequence[str],
    tokenizer: Tokenizer,
    folder: Path,
    on_bytes: Callable[[int], object],
) -> dict[str, Domain]:
    """Write the token files of a corpus whose documents belong to other domains.

    Documents of a new domain are in the order of the old domains, and of the documents in them.

    Args:
        corpus: to read.
        labels: old domain and split -> [num_documents], the position in ``names`` of each
            document's new domain. Domains that are not here are unchanged.
        names: new domains.
        tokenizer: of the corpus.
        folder: an existing, empty folder.
        on_bytes: called with the number of bytes of tokens just copied.

    Returns:
        The unchanged domains, followed by the new ones.

    Raises:
        UserError: if the corpus is damaged, or the disk is full.
    """
    with writing(folder):
        (folder / TOKENS_NAME).mkdir()
    divided = {name for name, _ in labels}
    assert not (set(corpus.names) - divided) & set(names), "a name is taken"
    unchanged = {
        name: _linked(corpus, name, folder) for name in corpus.names if name not in divided
    }
    sizes = token_bytes(tokenizer)
    writer = CorpusWriter(folder, names, corpus.dtype)
    for (name, split), targets in labels.items():
        if not len(targets):
            continue
        tokens = open_tokens(corpus, name, split)
        text_bytes = document_bytes(tokens, sizes, corpus.domains[name].split(split).text_bytes)
        files = targets.astype(np.int64) * len(SPLITS) + SPLITS.index(split)
        # Consecutive documents of one file are copied at once, up to a limit.
        begins = np.flatnonzero(np.diff(files, prepend=-1))
        begins = np.union1d(begins, np.arange(0, len(files), _BLOCK_DOCUMENTS))
        ends = np.append(begins[1:], len(files))
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            file, lengths = int(files[begin]), np.array(tokens.lengths[begin:end])
            writer.add_documents(file, lengths, int(text_bytes[begin:end].sum()))
            first = int(tokens.starts[begin])
            stop = first + int(lengths.sum(dtype=np.int64))
            for start in range(first, stop, _BLOCK_TOKENS):
                block = tokens.tokens[start : min(start + _BLOCK_TOKENS, stop)]
                writer.add_tokens(file, block.tobytes())
                on_bytes(block.nbytes)
    return {**unchanged, **writer.finish()}


def _linked(corpus: Corpus, name: str, folder: Path) -> Domain:
    """An unchanged domain: its files are linked into ``folder``."""
    parts = []
    for split in SPLITS:
        prefix = f"{TOKENS_NAME}/{file_name_of(name)}-{split}"
        part = corpus.domains[name].split(split)
        for suffix in (".bin", ".idx", *([".xxh3"] if part.block_checksums else [])):
            source = Path(f"{corpus.prefix(name, split)}{suffix}")
            link_or_copy(source, folder / f"{prefix}{suffix}")
        parts.append(dataclasses.replace(part, prefix=prefix))
    return Domain(*parts)


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """[vocab_size] int32: the UTF-8 bytes that a token adds to a text, 0 for end-of-document.

    Measured by a second occurrence of the token: some libraries strip the space of the first token
    of a text. Part of a character decodes to a replacement character and counts as one byte, which
    is exact but for tokens of several bytes of one character.
    """
    sizes = np.zeros(tokenizer.vocab_size, dtype=np.int32)
    for token in range(tokenizer.vocab_size):
        sizes[token] = max(0, _size(tokenizer, [token] * 2) - _size(tokenizer, [token]))
    sizes[tokenizer.identity.eod_id] = 0
    return sizes


def document_bytes(
    tokens: TokenFile, sizes: NDArray[np.int32], text_bytes: int
) -> NDArray[np.int64]:
    """[num_documents] int64 bytes of text, which sum to ``text_bytes``.

    A corpus records the sum of a split, which was counted when the text was read. It is divided in
    proportion to the bytes of the documents' tokens.

    Args:
        tokens: of a split, one document a sequence.
        sizes: bytes of each token of the vocabulary.
        text_bytes: of all documents together.
    """
    counted = np.concatenate([np.zeros(0, np.int64), *_counted(tokens, sizes)])
    total = int(counted.sum())
    if total == 0:
        counted, total = tokens.lengths.astype(np.int64), int(tokens.tokens.size)
    if total == 0:
        return counted
    # The ends are rounded rather than the differences: the last end is exact.
    ends = np.rint(np.cumsum(counted) * (text_bytes / total)).astype(np.int64)
    ends[-1] = text_bytes
    return np.diff(ends, prepend=0)


def _counted(tokens: TokenFile, sizes: NDArray[np.int32]) -> Iterator[NDArray[np.int64]]:
    """Bytes of the documents' tokens, a block of documents at a time."""
    ends = np.cumsum(tokens.lengths, dtype=np.int64)
    first = 0
    while first < len(ends):
        begin = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, begin + _BLOCK_TOKENS, side="right")))
        running = np.cumsum(sizes[tokens.tokens[begin : ends[stop - 1]]], dtype=np.int64)
        running = np.concatenate([[0], running])
        yield np.diff(running[ends[first:stop] - begin], prepend=0)
        first = stop


def _size(tokenizer: Tokenizer, ids: list[int]) -> int:
    text = tokenizer.decode(ids)
    return len(text.encode("utf-8", "surrogatepass")) - 2 * text.count(_REPLACEMENT)
