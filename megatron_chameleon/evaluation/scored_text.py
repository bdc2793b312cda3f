"""What is known of held-out text without a model: its clusters, its bytes, its unigram loss."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus, Split
from megatron_chameleon.artifacts.clusters import MAX_CLUSTERS
from megatron_chameleon.corpus.indexed import TokenFile, open_tokens
from megatron_chameleon.evaluation.held_out import HeldOutText
from megatron_chameleon.evaluation.unigram import token_counts, unigram_loss

_CHUNK = 1 << 24


@dataclasses.dataclass(frozen=True)
class ClusterMap:
    """Which cluster a token of a split belongs to.

    Attributes:
        document_ends: [d] int64, one past the last token of each document.
        cluster_of_document: [d] int64; of one without scored tokens it says nothing.
        count: clusters there are; see :class:`Clusters`.
    """

    document_ends: NDArray[np.int64]
    cluster_of_document: NDArray[np.int64]
    count: int

    @classmethod
    def of(cls, tokens: TokenFile, text: HeldOutText) -> ClusterMap:
        """The clusters of what ``text`` scores of ``tokens``, whose sequences are documents."""
        ends = tokens.starts + tokens.lengths
        first, last = (
            np.searchsorted(ends, place, side="right")
            for place in (text.windows.scored, text.windows.end - 1)
        )
        covering = np.zeros(len(ends) + 1, np.int64)
        np.add.at(covering, first, 1)
        np.add.at(covering, last + 1, -1)
        is_scored = (np.cumsum(covering)[:-1] > 0) & (tokens.lengths > 0)
        documents = int(is_scored.sum())
        count = min(documents, MAX_CLUSTERS)
        number = np.maximum(np.cumsum(is_scored) - 1, 0)
        return cls(ends, number * count // max(documents, 1), count)

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The clusters of the tokens at ``positions``, of any shape."""
        documents = np.searchsorted(self.document_ends, positions, side="right")
        found: NDArray[np.int64] = self.cluster_of_document[documents]
        return found


@dataclasses.dataclass(frozen=True)
class ScoredText:
    """What a text's scored tokens are, whatever the model says of them.

    Attributes:
        tokens: [c] in each cluster; some may have none.
        text_bytes: [c] bytes of text that they stand for; None where nobody knows.
        unigram_loss: see :func:`unigram_loss`; 0 where there is no token.
    """

    tokens: NDArray[np.int64]
    text_bytes: NDArray[np.int64] | None
    unigram_loss: float


def scored_text(
    corpus: Corpus,
    name: str,
    split: Split,
    text: HeldOutText,
    clusters: ClusterMap,
    sizes: NDArray[np.int32] | None,
) -> ScoredText:
    """Go through the labels that count, and through the training text that they are held up to.

    Args:
        corpus: of which ``text`` is a part.
        name: of the domain.
        split: of ``text``.
        text: windows of the split.
        clusters: of the same.
        sizes: [vocab_size] bytes of each token; None if the tokenizer is not there.
    """
    vocab_size = corpus.tokenizer.vocab_size
    tokens = np.zeros(clusters.count, np.int64)
    counted = np.zeros(clusters.count, np.float64)
    seen = np.zeros(vocab_size, np.int64)
    for first, last in text.blocks():
        positions = text.scored_positions(first, last)
        labels, cluster = text.stream[positions], clusters.at(positions)
        tokens += np.bincount(cluster, minlength=clusters.count)
        seen += np.bincount(labels, minlength=vocab_size)
        if sizes is not None:
            counted += np.bincount(cluster, sizes[labels], minlength=clusters.count)
    training = token_counts(open_tokens(corpus, name, "train").tokens, vocab_size)
    loss = unigram_loss(training, seen, vocab_size) if seen.any() else 0.0
    scale = None if sizes is None else _bytes_by_count(corpus, name, split, text, sizes)
    return ScoredText(tokens, None if scale is None else _rounded(counted * scale), loss)


def _bytes_by_count(
    corpus: Corpus, name: str, split: Split, text: HeldOutText, sizes: NDArray[np.int32]
) -> float | None:
    """Bytes of the split's text over those its tokens decode to, which are not quite the same.

    A tokenizer may drop or change characters, and a token may be a part of one. The bytes of the
    text were counted when it was read.
    """
    counted = sum(
        int(sizes[text.stream[first : first + _CHUNK]].sum(dtype=np.int64))
        for first in range(0, len(text.stream), _CHUNK)
    )
    known = corpus.domains[name].split(split).text_bytes
    return known / counted if counted and known else None


def _rounded(figures: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers near ``figures`` whose sum is that of theirs, rounded."""
    ends = np.rint(np.cumsum(figures)).astype(np.int64)
    return np.diff(ends, prepend=0)
