"""Documents that repeat an earlier document of their domain: exactly, or nearly by MinHash.

Nearly repeated documents are found as in FineWeb (Penedo et al., 2024, https://arxiv.org/abs/
2406.17557, appendix E.1), but from shingles of tokens instead of words: MinHash (Broder, 1997) of
all 5-grams, in 14 bands of 8 values. A document repeats an earlier one if all values of a band are
equal. At a Jaccard similarity s of the 5-grams, the probability is 1 - (1 - s^8)^14: 0.05 at
s = 0.5, 0.56 at 0.7, 0.92 at 0.8, and 0.9996 at 0.9.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Corpus, Repeats
from megatron_chameleon.artifacts.corpus import table_label
from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.corpus.sources import INSTALL_DATA
from megatron_chameleon.errors import UserError
from megatron_chameleon.progress import progress_bar

SHINGLE_TOKENS = 5
BANDS, BAND_VALUES = 14, 8
_SEED = 1
# Tokens and documents compared at a time; the MinHash of a document takes 4 KiB in Python integers.
_BLOCK_TOKENS, _BLOCK_DOCUMENTS = 1 << 22, 1 << 14
# Odd constants of 64-bit hash functions (splitmix64).
_MULTIPLIERS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def require_minhash() -> None:
    """Check that MinHash is installed.

    Raises:
        UserError: with the command that installs it.
    """
    try:
        import rensa  # noqa: F401
    except ImportError as error:
        raise UserError(f"--find-repeats near needs the package rensa; {INSTALL_DATA}") from error


def find_repeats(corpus: Corpus, *, near: bool, folder: Path) -> dict[str, Repeats]:
    """Count the repeated documents of each domain, in the order train, valid, test.

    Memory holds about 100 bytes for each document of the largest domain.

    Args:
        corpus: the corpus, which need not be on disk itself.
        near: whether nearly repeated documents are counted, too. This takes 112 bytes on disk for
            each document of the largest domain.
        folder: existing folder for temporary files.

    Raises:
        UserError: if tokens are damaged, or the disk is full.
    """
    opened = open_domains(corpus)
    found = {}
    total = sum(d.split(s).tokens for d in corpus.all_domains.values() for s in SPLITS)
    with progress_bar(total, " tokens", "comparing documents") as bar:
        for name, domain in corpus.all_domains.items():
            splits = [split for split in SPLITS if domain.split(split).documents]
            files = [opened.open(name, split) for split in splits]
            found[name] = count_repeats(files, near, folder, bar.update)
    return found


def count_repeats(
    files: Sequence[TokenFile],
    near: bool,
    folder: Path,
    on_tokens: Callable[[int], object] = lambda num_tokens: None,
) -> Repeats:
    """Count the documents of ``files`` that repeat an earlier one; see :func:`find_repeats`.

    Args:
        files: tokens with one sequence per document.
        near: whether nearly repeated documents are counted, too.
        folder: existing folder for a temporary file.
        on_tokens: called with the number of tokens just read.
    """
    lengths = np.concatenate([np.empty(0, np.int64), *(np.asarray(f.lengths) for f in files)])
    digests = np.empty((len(lengths), 2), np.uint64)
    with writing(folder), tempfile.TemporaryFile(dir=folder) as stream:
        bands = None
        if near and len(lengths):
            bands = np.memmap(stream, np.uint64, "w+", shape=(BANDS, len(lengths)))
        first = 0
        for tokens, sizes in _blocks(files):
            stop = first + len(sizes)
            ends = np.cumsum(sizes).tolist()
            parts = (tokens[a:b].tobytes() for a, b in zip([0, *ends], ends, strict=False))
            joined = b"".join(map(xxhash.xxh3_128_digest, parts))
            digests[first:stop] = np.frombuffer(joined, ">u8").reshape(-1, 2)
            if bands is not None:
                bands[:, first:stop] = band_hashes(tokens, sizes).T
            first = stop
            on_tokens(tokens.size)
        exact = repeats_earlier(digests)
        counts = int(exact.sum()), int(lengths[exact].sum())
        found = Repeats(len(lengths), int(lengths.sum()), *counts)
        if not near:
            return found
        is_near = np.zeros(len(lengths), np.bool_)
        for band in [] if bands is None else bands:
            is_near |= repeats_earlier(np.asarray(band)[:, None])
    is_near &= ~exact
    return dataclasses.replace(
        found, near_documents=int(is_near.sum()), near_tokens=int(lengths[is_near].sum())
    )


def _blocks(files: Sequence[TokenFile]) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """Yield the tokens of some documents, and their lengths."""
    for file in files:
        ends = np.cumsum(file.lengths, dtype=np.int64)
        first, start = 0, 0
        while first < len(ends):
            stop = int(np.searchsorted(ends, start + _BLOCK_TOKENS, side="right"))
            stop = min(max(first + 1, stop), first + _BLOCK_DOCUMENTS)
            end = int(ends[stop - 1])
            tokens = np.asarray(file.tokens[start:end]).astype(np.int32)
            yield tokens, np.diff(ends[first:stop], prepend=start)
            first, start = stop, end


def repeats_earlier(keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each of ``keys`` [n, words] equals an earlier one, [n]."""
    order = np.lexsort(keys.T)
    equal = np.ones(max(0, len(keys) - 1), np.bool_)
    for word in keys.T:
        in_order = word[order]
        equal &= in_order[1:] == in_order[:-1]
    same = np.zeros(len(keys), np.bool_)
    same[order[1:]] = equal
    return same


def band_hashes(tokens: NDArray[np.integer], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash the bands of each document's MinHash.

    Args:
        tokens: [num_tokens] concatenated tokens of the documents.
        lengths: [num_documents] tokens of each document.

    Returns:
        [num_documents, BANDS] uint64.
    """
    import rensa

    hashes, offsets = shingles(tokens, lengths)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
        hashes, offsets, BANDS * BAND_VALUES, _SEED
    )
    values = np.array(matrix.to_rows(), np.uint64).reshape(-1, BANDS, BAND_VALUES)
    found = np.zeros(values.shape[:2], np.uint64)
    for place in range(BAND_VALUES):
        found = _mixed(found + values[:, :, place])
    return found


def shingles(
    tokens: NDArray[np.integer], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Hash every ``SHINGLE_TOKENS`` consecutive tokens of each document.

    A shorter document is one shingle, unless it is empty.

    Args:
        tokens: [num_tokens] concatenated tokens of the documents.
        lengths: [num_documents] tokens of each document.

    Returns:
        [num_shingles] uint64, and [num_documents + 1] positions at which documents begin.
    """
    ends = np.repeat(np.cumsum(lengths), lengths)
    left = ends - np.arange(len(tokens))  # tokens up to the document's end
    ids = np.zeros(len(tokens) + SHINGLE_TOKENS, np.uint64)
    ids[: len(tokens)] = tokens.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(len(tokens), np.uint64)
    for place in range(SHINGLE_TOKENS):
        here = np.where(left > place, ids[place : place + len(tokens)], np.uint64(0))
        hashes = _mixed(hashes + here)
    is_first = left == np.repeat(lengths, lengths)
    counts = np.where(lengths > 0, np.maximum(1, lengths - SHINGLE_TOKENS + 1), 0)
    kept = hashes[(left >= SHINGLE_TOKENS) | is_first]
    return kept, np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)


def _mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of 64-bit integers, as splitmix64 does."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * _MULTIPLIERS[0]
    hashes = (hashes ^ (hashes >> np.uint64(27))) * _MULTIPLIERS[1]
    return hashes ^ (hashes >> np.uint64(31))


def format_repeats(corpus: Corpus) -> str:
    """Format the repeated documents of each domain, and their shares of the domain's tokens."""
    import pandas as pd

    rows = {table_label(n, corpus.held_out): _row(r) for n, r in corpus.repeats.items()}
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.columns.name = "repeated in domain"
    return table.to_string()


def _row(repeats: Repeats) -> Mapping[str, str]:
    return {
        name: f"{documents:,} ({tokens / max(1, repeats.tokens):.2%} of tokens)"
        for name, documents, tokens in repeats.kinds()
    }
