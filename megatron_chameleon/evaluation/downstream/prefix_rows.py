"""Token sequences packed into rows in which a beginning that several share stands once.

The answers to a question differ in their last few tokens, and the contexts of one document in a few
words. A row is a tree of such sequences: each token sees the tokens of its own sequence before it
and no others, at the position it has there. So a model gives for it what it would give for the
sequence alone, and reads the shared beginning once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.model.flops import layer_forward_flops
from megatron_chameleon.model.readout import padded_length
from megatron_chameleon.model.sizes import ModelShape

Tokens = NDArray[np.int32]
# The part of a batch's longest row that its others fill, at least.
FILLED = 0.75


@dataclasses.dataclass(frozen=True)
class Segment:
    """Tokens of a row from ``start`` on, up to the next segment, that follow on ``before``.

    ``before`` [n] are the places in the row of the tokens that come before them, in order.
    """

    start: int
    before: NDArray[np.int64]


@dataclasses.dataclass
class Row:
    """One row, while it is filled and after.

    Attributes:
        tokens: parts of the row, one for each segment.
        segments: the branches of the tree.
        predicting: number of a sequence, and the places in the row of the tokens that predict
            what is asked of it.
        length: tokens in the row.
    """

    tokens: list[Tokens] = dataclasses.field(default_factory=list)
    segments: list[Segment] = dataclasses.field(default_factory=list)
    predicting: list[tuple[int, NDArray[np.int64]]] = dataclasses.field(default_factory=list)
    length: int = 0

    def add(self, new: Tokens, before: NDArray[np.int64]) -> NDArray[np.int64]:
        """Append the tokens ``new`` after those at ``before``; the places of all of them."""
        places = np.arange(self.length, self.length + len(new))
        if len(new):
            self.tokens.append(new)
            self.segments.append(Segment(self.length, before))
            self.length += len(new)
        return np.concatenate([before, places])

    @property
    def is_chain(self) -> bool:
        """Whether every token follows on all that stand before it."""
        return all(len(segment.before) == segment.start for segment in self.segments)

    def all_tokens(self) -> Tokens:
        """[length] int32."""
        return np.concatenate(self.tokens)

    def positions(self) -> NDArray[np.int64]:
        """The position of each token in its sequences, [length] int64."""
        parts = zip(self.segments, self.tokens, strict=True)
        return np.concatenate([len(part.before) + np.arange(len(new)) for part, new in parts])

    def visible(self) -> NDArray[np.bool_]:
        """[length, length] bool: whether the row's token sees the column's."""
        seen = np.zeros((self.length, self.length), dtype=bool)
        for part, new in zip(self.segments, self.tokens, strict=True):
            own = slice(part.start, part.start + len(new))
            seen[own, part.before] = True
            seen[own, own] = np.tri(len(new), dtype=bool)
        return seen


@dataclasses.dataclass(frozen=True)
class Packing:
    """When a sequence joins the row of the one before it: if that takes less work.

    Attributes:
        longest: tokens of a row of more than one sequence, at most.
        token_work: of one token, in any unit.
        pair_work: of one token looking at another; a row of n tokens takes n * n.
    """

    longest: int
    token_work: float
    pair_work: float

    @classmethod
    def of(cls, shape: ModelShape) -> Packing:
        """For a model, in forward FLOPs of one layer; rows of twice its sequence length."""
        return cls(
            longest=2 * shape.max_sequence_length,
            token_work=layer_forward_flops(shape, seq_length=0),  # without any attention
            pair_work=4 * shape.size.hidden_size,
        )

    def joins(self, row_length: int, sequence_length: int, shared: int) -> bool:
        """Whether a sequence joins a row of ``row_length`` with which it has ``shared`` tokens."""
        together = row_length + sequence_length - shared
        more_pairs = together**2 - row_length**2 - sequence_length**2
        return (
            shared > 0
            and together <= self.longest
            and more_pairs * self.pair_work < shared * self.token_work
        )


def pack(sequences: Sequence[Tokens], predicting: Sequence[int], packing: Packing) -> list[Row]:
    """Put every sequence into a row.

    Args:
        sequences: each of at least one token, none negative.
        predicting: how many of its last tokens predict something, for each sequence.
        packing: when sequences share a row.
    """
    rows: list[Row] = []
    previous, path = np.empty(0, np.int32), np.empty(0, np.int64)
    # In the order of their bytes, those that share most stand next to each other, and what another
    # sequence begins with stands before it.
    for number in sorted(range(len(sequences)), key=lambda n: sequences[n].tobytes()):
        tokens = sequences[number]
        shared = shared_length(previous, tokens)
        if not rows or not packing.joins(rows[-1].length, len(tokens), shared):
            rows.append(Row())
            shared = 0
        path = rows[-1].add(tokens[shared:], path[:shared])
        rows[-1].predicting.append((number, path[len(path) - predicting[number] :]))
        previous = tokens
    return rows


def shared_length(first: Tokens, second: Tokens) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def batches(rows: Sequence[Row], tokens_at_once: int, multiple: int = 1) -> Iterator[list[Row]]:
    """Rows of like lengths, longest first, as many as have so many tokens when padded.

    At least one row each: what is too much for the memory is found out at once.

    Args:
        rows: to be put into batches.
        tokens_at_once: of a batch, padding included.
        multiple: to which the longest row of a batch is padded, and the others with it.
    """
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: -row.length):
        if batch and not _fits(row, batch, tokens_at_once, multiple):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _fits(row: Row, batch: Sequence[Row], tokens_at_once: int, multiple: int) -> bool:
    """Whether a row may join a batch that has longer ones."""
    longest = batch[0].length
    width = padded_length(longest, multiple)
    return (len(batch) + 1) * width <= tokens_at_once and row.length >= FILLED * longest
