"""Plain reference of the evaluation protocols: list each scored token with its context."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Protocol
from megatron_chameleon.artifacts.evaluation_result import FirstToken, Packing
from megatron_chameleon.corpus.indexed import BlockTokens, TokenFile

EOD = 9
PACKINGS: list[Packing] = ["packed", "documents"]
DOCUMENTS = st.lists(
    st.one_of(
        st.just([]), st.lists(st.integers(0, 8), max_size=25).map(lambda tokens: [*tokens, EOD])
    ),
    max_size=8,
)
"""Random documents; some are empty, and some have only the end-of-document token."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A scored token with its context and its document."""

    context: tuple[int, ...]
    label: int
    document: int


@st.composite
def protocols(draw: st.DrawFn) -> Protocol:
    window_length = draw(st.integers(1, 12))
    packing: Packing = draw(st.sampled_from(PACKINGS))
    firsts: list[FirstToken] = ["not-scored"]
    if packing == "documents":
        firsts.append("after-eod")
    return Protocol(
        split="test",
        window_length=window_length,
        packing=packing,
        end_of_document=draw(st.booleans()),
        overlap=draw(st.integers(0, window_length - 1)),
        first_token=draw(st.sampled_from(firsts)),
    )


def token_file(documents: Sequence[Sequence[int]]) -> TokenFile:
    """Return the documents as the token file of a split."""
    lengths = np.array([len(document) for document in documents], np.int32)
    tokens = np.array([token for document in documents for token in document], np.uint16)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    checked = BlockTokens(Path("none"), tokens)
    return TokenFile(Path("none"), checked, lengths, pointers, np.arange(len(lengths) + 1))


def predictions(
    documents: Sequence[Sequence[int]], protocol: Protocol, eod: int = EOD
) -> list[Prediction]:
    """List every prediction in the order of the text."""
    found = []
    for tokens_in_range in ranges_of(documents, protocol, eod):
        before = [eod] if protocol.first_token == "after-eod" else []
        found += list(windows_over(before, tokens_in_range, protocol))
    return [one for one in found if protocol.end_of_document or one.label != eod]


def ranges_of(
    documents: Sequence[Sequence[int]], protocol: Protocol, eod: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield ranges of (token, document) pairs; no window crosses the end of a range."""
    each = [[(token, d) for token in document] for d, document in enumerate(documents)]
    if protocol.packing == "packed":
        yield [pair for document in each for pair in document]
        return
    for document in each:
        ends = document and document[-1][0] == eod and not protocol.end_of_document
        yield document[:-1] if ends else document


def windows_over(
    before: list[int], tokens_in_range: list[tuple[int, int]], protocol: Protocol
) -> Iterator[Prediction]:
    """Yield the predictions of one range; ``before`` is the context of its first token."""
    context = [*before, *(token for token, _ in tokens_in_range)]
    labels = tokens_in_range[1 - len(before) :]
    start = done = 0
    while done < len(labels):
        end = min(start + protocol.window_length, len(labels))
        for place in range(done, end):
            yield Prediction(tuple(context[start : place + 1]), *labels[place])
        done, start = end, end - protocol.overlap
