"""The token files of each domain of a run, and checks of the domains' weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import Corpus, Split, TokenizerIdentity
from megatron_chameleon.corpus.indexed import (
    ExpectedTokens,
    TokenFile,
    expected_tokens,
    open_token_file,
)
from megatron_chameleon.errors import UserError

MAX_DOMAINS = int(np.iinfo(np.int16).max)
"""Domain numbers are int16, as in Megatron's blended index."""


@dataclasses.dataclass(frozen=True)
class DomainData:
    """The sequences of one domain: ``first`` to ``stop`` of a pair of .bin/.idx files.

    Attributes:
        name: name of the domain in weights and records.
        prefix: path of the files, without their suffix.
        first: first sequence.
        stop: one past the last sequence.
        tokens: number of tokens in these sequences.
        order_key: text that is hashed with the seed to get the order within the domain; it does not
            depend on paths.
        vocab_size: one more than the largest token id.
        expected: dtype, counts and checksums from corpus.json; None for other files.
    """

    name: str
    prefix: Path
    first: int
    stop: int
    tokens: int
    order_key: str
    vocab_size: int
    expected: ExpectedTokens | None = None

    def open(self) -> TokenFile:
        """Open and check the whole file that holds the sequences.

        Raises:
            UserError: if it is damaged, has changed, or has an unsupported token type.
        """
        file = open_token_file(self.prefix, self.expected, self.vocab_size)
        if file.dtype not in (np.uint16, np.int32):
            raise UserError(
                f"{self.prefix}.bin holds tokens of type {file.dtype}, but only uint16 "
                "and int32 are supported; preprocess the data again"
            )
        if len(file) < self.stop or tokens_between(file, self.first, self.stop) != self.tokens:
            raise UserError(
                f"{self.prefix}.idx has changed since the start; restore it, and run again"
            )
        return file


def tokens_between(file: TokenFile, first: int, stop: int) -> int:
    """Number of tokens in sequences ``first`` to ``stop``."""
    return int(file.lengths[first:stop].sum(dtype=np.int64))


@dataclasses.dataclass(frozen=True)
class TokenData:
    """All domains of a run, in the order of its weights.

    Attributes:
        where: corpus folder or option that the user passed, for messages.
        domains: the sequences of each domain.
        tokenizer: vocabulary and end-of-document token.
        hash: hex SHA-256 of the contents, independent of paths.
    """

    where: str
    domains: tuple[DomainData, ...]
    tokenizer: TokenizerIdentity
    hash: str

    @property
    def names(self) -> list[str]:
        """Domain names, in the order of the weights."""
        return [domain.name for domain in self.domains]

    @property
    def tokens(self) -> dict[str, int]:
        """Domain -> number of tokens in one epoch."""
        return {domain.name: domain.tokens for domain in self.domains}


def corpus_tokens(corpus: Corpus, split: Split = "train") -> TokenData:
    """Return one split of every domain of a corpus."""
    domains = []
    for name in corpus.names:
        part = corpus.domains[name].split(split)
        domain = DomainData(
            name,
            corpus.prefix(name, split),
            first=0,
            stop=part.documents,
            tokens=part.tokens,
            order_key=name,
            vocab_size=corpus.tokenizer.vocab_size,
            expected=expected_tokens(corpus, part),
        )
        domains.append(domain)
    return TokenData(str(corpus.root), tuple(domains), corpus.tokenizer, corpus.hash)


def check_enough_tokens(data: TokenData, weights: Sequence[float], seq_length: int) -> None:
    """Check that every domain with a weight holds at least one sequence.

    Raises:
        UserError: if one does not; the message names the first such domain.
    """
    for domain, weight in zip(data.domains, weights, strict=True):
        if weight > 0 and domain.tokens < seq_length + 1:
            raise UserError(
                f"domain '{domain.name}' of {data.where} has {domain.tokens} tokens to train on, "
                f"fewer than one sequence of {seq_length}+1; use a shorter --seq-length, more "
                "text, or weight 0"
            )


def check_weights(data: TokenData, weights: Sequence[float]) -> None:
    """Check that ``weights`` are valid sampling weights.

    Raises:
        UserError: unless there is one finite, non-negative weight per domain and at least one is
            positive.
    """
    if len(weights) != len(data.domains):
        raise UserError(
            f"{len(weights)} weights for the {len(data.domains)} domains of {data.where}; "
            "pass one per domain"
        )
    for name, weight in zip(data.names, weights, strict=True):
        if not math.isfinite(weight) or weight < 0:
            raise UserError(f"weight of '{name}' is {weight}; weights must be finite and >= 0")
    if np.count_nonzero(weights) > MAX_DOMAINS:
        raise UserError(
            f"{np.count_nonzero(weights)} domains of {data.where} have a weight above 0, but a "
            f"blend holds at most {MAX_DOMAINS}; set some weights to 0, or merge domains"
        )
    if not 0 < sum(weights) < math.inf:
        raise UserError("the weights must sum to a finite number above 0; scale them to sum to 1")
