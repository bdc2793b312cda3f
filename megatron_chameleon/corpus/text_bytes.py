"""How many bytes of text each document has, of a corpus that says it of whole splits alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.corpus.tokenization.tokenizer import Tokenizer

_BLOCK_TOKENS = 1 << 22
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """[vocab_size] int32: the UTF-8 bytes that a token adds to a text, 0 for end-of-document.

    What it adds is what its second occurrence in a row does: some libraries take the space off the
    first token of a text. Part of a character decodes to a replacement character and counts as one
    byte, which is exact but for tokens of several bytes of one character.
    """
    sizes = np.zeros(tokenizer.vocab_size, dtype=np.int32)
    for token in range(tokenizer.vocab_size):
        sizes[token] = max(0, _size(tokenizer, [token] * 2) - _size(tokenizer, [token]))
    sizes[tokenizer.identity.eod_id] = 0
    return sizes


def document_bytes(
    tokens: TokenFile, sizes: NDArray[np.int32], text_bytes: int
) -> NDArray[np.int64]:
    """[num_documents] int64 bytes of text, which add up to ``text_bytes``.

    That sum, which was counted when the text was read, is dealt out in proportion to the bytes of
    the documents' tokens.

    Args:
        tokens: of a split, a document a sequence.
        sizes: bytes of each token of the vocabulary.
        text_bytes: of all documents together.
    """
    counted = np.concatenate([np.zeros(0, np.int64), *_counted(tokens, sizes)])
    total = int(counted.sum())
    if total == 0:
        counted, total = tokens.lengths.astype(np.int64), int(tokens.tokens.size)
    if total == 0:
        return counted
    # Rounded ends of stretches, rather than rounded stretches: the last end is the whole.
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
