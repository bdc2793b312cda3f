"""Where each sample starts in a shuffled run of documents."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megatron_chameleon.blend.threads import even_ranges, for_each, usable_threads

# Threads cost about 0.1 ms to start; so many documents take one thread about 0.3 ms.
DOCUMENTS_WORTH_A_THREAD = 1 << 17
GATHER_BLOCK = 1 << 14


def build_sample_index(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token: bool = True,
    num_threads: int | None = None,
) -> NDArray[Any]:
    """The sample index of a GPT data set, bit-identical to Megatron's compiled helper.

    The documents of ``document_index``, one after another, are one stream of tokens; sample s
    starts at token ``s * seq_length`` of it. With the extra token a start is the document which
    holds that token. Without, it may be the end of the document before.

    A last sample that is cut short ends at the last token of the last document. Where that document
    is empty and there is an extra token, this end is at offset -1, which a reader that adds the
    extra token takes as it should; ``helpers.build_sample_idx`` stops there with an assertion.

    Args:
        lengths: [num_documents] int32, tokens of each document; not negative.
        document_index: [entries] int32, the documents in the order in which they are read.
        seq_length: tokens from one sample's start to the next one's.
        num_epochs: how often ``document_index`` holds each document.
        tokens_per_epoch: tokens that one epoch holds.
        drop_last_partial_sequence: whether to leave out a last sample that is not full.
        add_extra_token: whether samples are one token longer, for the last label.
        num_threads: by default one for every core this process may run on.

    Returns:
        [num_samples + 1, 2] int32 or, from 2**31 entries on, int64: a position in
        ``document_index`` and an offset into that document.

    Raises:
        ValueError: for arrays of other types, a document that ``lengths`` does not have, or samples
            of no tokens.
    """
    _check_arguments(lengths, document_index, seq_length)
    num_samples = count_samples(
        seq_length, num_epochs * tokens_per_epoch, drop_last_partial_sequence, add_extra_token
    )
    dtype = np.int32 if document_index.size <= np.iinfo(np.int32).max else np.int64
    starts = np.empty((num_samples + 1, 2), dtype)
    starts[0] = 0
    if num_samples == 0:
        return starts
    _check_documents(lengths, document_index)
    extra = int(add_extra_token)
    threads = usable_threads(num_threads)
    worth = 1 + document_index.size // DOCUMENTS_WORTH_A_THREAD
    parts = even_ranges(document_index.size, min(threads, worth))
    ordered, tokens_before = _ordered_lengths(lengths, document_index, parts)
    # The row after the last start within the first so many tokens.
    rows = [
        min(max(1, 1 + (tokens - extra) // seq_length), num_samples + 1) for tokens in tokens_before
    ]
    # Where the stream has too few tokens, the last starts are its end.
    starts[rows[-1] :] = document_index.size - 1, int(ordered[-1]) - extra

    def fill(part: int) -> None:
        first, stop = parts[part].start, parts[part].stop
        offset = rows[part] * seq_length - tokens_before[part]
        span = rows[part], rows[part + 1]
        _fill_starts(ordered, first, stop, *span, offset, seq_length, extra, starts)

    for_each(fill, range(len(parts)), len(parts))
    return starts


def count_samples(
    seq_length: int, num_tokens: int, drop_last_partial_sequence: bool, add_extra_token: bool
) -> int:
    """How many samples a stream of tokens gives, counted as Megatron counts them.

    The count of samples with a partial last one goes through float32 there: from 2**24 samples on
    it may be off, and is the same here.
    """
    tokens = num_tokens - int(add_extra_token)
    if drop_last_partial_sequence:
        return max(tokens, 0) // seq_length
    return max(int(np.ceil(np.float32(tokens) / np.float32(seq_length))), 0)


def sample_index_reference(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    add_extra_token: bool = True,
) -> NDArray[np.int64]:
    """:func:`build_sample_index` of so many samples, token by token, for tests."""
    extra = int(add_extra_token)
    # ends[t]: where the stream stands once t + 1 tokens are read.
    ends = [
        (entry, offset + 1)
        for entry, document in enumerate(document_index)
        for offset in range(lengths[document])
    ]
    last = (len(document_index) - 1, int(lengths[document_index[-1]]))
    rows = [(0, 0)]
    for sample in range(1, num_samples + 1):
        needed = sample * seq_length + extra
        entry, offset = ends[needed - 1] if needed <= len(ends) else last
        rows.append((entry, offset - extra))
    return np.array(rows, np.int64)


def _check_arguments(
    lengths: NDArray[np.int32], document_index: NDArray[np.int32], seq_length: int
) -> None:
    if seq_length < 1:
        raise ValueError(f"seq_length is {seq_length}; a sample has at least one token")
    for name, array in (("lengths", lengths), ("document_index", document_index)):
        if array.dtype != np.int32 or array.ndim != 1:
            raise ValueError(f"{name} is {array.dtype} of shape {array.shape}; [n] int32 is needed")


def _check_documents(lengths: NDArray[np.int32], document_index: NDArray[np.int32]) -> None:
    if document_index.size == 0 or lengths.size == 0:
        raise ValueError("there are samples to make and no documents to make them of")
    if document_index.min() < 0 or document_index.max() >= lengths.size:
        raise ValueError(f"document_index goes beyond the {lengths.size} documents")
    if lengths.min() < 0:
        raise ValueError(f"document {lengths.argmin()} has a negative length")


def _ordered_lengths(
    lengths: NDArray[np.int32], document_index: NDArray[np.int32], parts: list[range]
) -> tuple[NDArray[np.int32], list[int]]:
    """Length of each entry, and the tokens before each part and after the last."""
    ordered = np.empty(document_index.size, np.int32)

    def gather(part: range) -> int:
        # numpy's own loop waits for more cache misses at once than a compiled gather does; by
        # blocks, since it makes 64-bit copies of the positions. clip: they are checked already.
        for first in range(part.start, part.stop, GATHER_BLOCK):
            block = slice(first, min(first + GATHER_BLOCK, part.stop))
            np.take(lengths, document_index[block], out=ordered[block], mode="clip")
        return int(ordered[part.start : part.stop].sum(dtype=np.int64))

    tokens = for_each(gather, parts, len(parts))
    return ordered, [0, *np.cumsum(tokens).tolist()]


@njit(cache=True, nogil=True)
def _fill_starts(
    ordered: NDArray[np.int32],
    first: int,
    stop: int,
    row: int,
    stop_row: int,
    offset: int,
    seq_length: int,
    extra: int,
    starts: NDArray[Any],
) -> None:
    """Write rows ``row`` to ``stop_row``: the starts that fall on entries ``first`` to ``stop``.

    ``offset`` is where row ``row`` starts, from the beginning of entry ``first`` on. An entry holds
    the starts at offsets up to its length without the extra token; with it, up to one less.
    """
    for entry in range(first, stop):
        last = ordered[entry] - extra
        # How many starts an entry holds is hard to foresee, and a branch guessed wrong costs more
        # than two rows: write them in any case, the next entry overwrites what is not its own.
        if row + 1 < stop_row:
            starts[row, 0] = entry
            starts[row, 1] = offset
            starts[row + 1, 0] = entry
            starts[row + 1, 1] = offset + seq_length
            held = int(offset <= last) + int(offset + seq_length <= last)
            row += held
            offset += held * seq_length
        while offset <= last and row < stop_row:
            starts[row, 0] = entry
            starts[row, 1] = offset
            row += 1
            offset += seq_length
        offset -= ordered[entry]
