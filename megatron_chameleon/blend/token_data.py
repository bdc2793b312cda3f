"""Where the tokens of a run lie: the domains of a corpus, or Megatron's --data-path."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from megatron_chameleon.artifacts import SPLITS, Corpus, Split, TokenizerIdentity
from megatron_chameleon.artifacts.files import sha256_of_files, sha256_of_json
from megatron_chameleon.corpus.indexed_reader import ExpectedTokens, TokenFile, open_token_file
from megatron_chameleon.errors import UserError

PLAIN_NUMBER = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")


@dataclasses.dataclass(frozen=True)
class DomainTokens:
    """The sequences of one domain: ``first`` to ``stop`` of a pair of .bin/.idx files.

    ``expected`` is what a corpus says of the files.
    """

    name: str
    prefix: Path
    first: int
    stop: int
    tokens: int
    expected: ExpectedTokens | None = None

    def open(self) -> TokenFile:
        """The whole file, of which the sequences are a part.

        Raises:
            UserError: if it is damaged, not what it was, or of a token type that is not read here.
        """
        file = open_token_file(self.prefix, self.expected)
        if file.dtype not in (np.uint16, np.int32):
            raise UserError(
                f"{self.prefix}.bin holds tokens of type {file.dtype}; data sets of uint16 and "
                "int32 are trained on: preprocess again"
            )
        if len(file) < self.stop or tokens_between(file, self.first, self.stop) != self.tokens:
            raise UserError(
                f"{self.prefix}.idx has changed since the start; restore it, and run again"
            )
        return file


def tokens_between(file: TokenFile, first: int, stop: int) -> int:
    """How many tokens sequences ``first`` to ``stop`` have."""
    return int(file.lengths[first:stop].sum(dtype=np.int64))


@dataclasses.dataclass(frozen=True)
class TokenData:
    """All domains that a run may draw from, in the order of its weights.

    Attributes:
        where: what the user gave, for messages.
        domains: their sequences.
        tokenizer: vocabulary and end-of-document token.
        hash: hex SHA-256 of what the tokens are.
    """

    where: str
    domains: tuple[DomainTokens, ...]
    tokenizer: TokenizerIdentity
    hash: str

    @property
    def names(self) -> list[str]:
        """Domain names, in the order in which weights list them."""
        return [domain.name for domain in self.domains]

    @property
    def tokens(self) -> dict[str, int]:
        """Domain -> tokens of one epoch."""
        return {domain.name: domain.tokens for domain in self.domains}


def corpus_tokens(corpus: Corpus, split: Split = "train") -> TokenData:
    """One split of every domain of a corpus."""
    parts = [(name, corpus.domains[name].split(split)) for name in corpus.names]
    domains = [
        DomainTokens(
            name,
            corpus.prefix(name, split),
            first=0,
            stop=part.documents,
            tokens=part.tokens,
            expected=ExpectedTokens(corpus.dtype, part.documents, part.tokens),
        )
        for name, part in parts
    ]
    return TokenData(str(corpus.root), tuple(domains), corpus.tokenizer, corpus.hash)


@dataclasses.dataclass(frozen=True)
class DataPath:
    """What ``--data-path`` says: prefixes, and their weights unless it gives none."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    @classmethod
    def parse(cls, given: str) -> DataPath:
        """Read '0.3 PREFIX 0.7 PREFIX', or 'PREFIX' alone, or several without weights.

        Raises:
            UserError: if it is neither, or names a prefix twice.
        """
        words = given.split()
        weights = [_number(word) for word in words[::2]]
        pairs = len(words) % 2 == 0 and None not in weights
        prefixes = words[1::2] if pairs else words
        if not prefixes or any(_number(word) is not None for word in prefixes):
            raise UserError(
                f"--data-path '{given}': give 'WEIGHT PREFIX WEIGHT PREFIX ...', or prefixes alone"
            )
        files = [Path(prefix).resolve() for prefix in prefixes]
        twice = [
            prefix for prefix, file in zip(prefixes, files, strict=True) if files.count(file) > 1
        ]
        if twice:
            raise UserError(f"--data-path names {twice[0]} twice; add its weights up")
        return cls(tuple(prefixes), tuple(map(float, weights)) if pairs else None)  # type: ignore[arg-type]


def data_path_tokens(
    path: DataPath, split: str, tokenizer: TokenizerIdentity, part: Split = "train"
) -> TokenData:
    """One split of Megatron data sets, cut as Megatron-LM cuts them by ``--split``.

    Raises:
        UserError: for files that are damaged or hold no sequence of this split.
    """
    begin, end = split_range(split, part)
    domains, contents = [], []
    for prefix in map(Path, path.prefixes):
        file = open_token_file(prefix)
        num_sequences = len(file)
        # Rounded as in Megatron's BlendedMegatronDatasetBuilder.
        first, stop = round(begin * float(num_sequences)), round(end * float(num_sequences))
        tokens = tokens_between(file, first, stop)
        domains.append(DomainTokens(str(prefix), prefix, first, stop, tokens))
        idx = prefix.with_name(prefix.name + ".idx")
        contents.append([str(prefix), first, stop, file.tokens.size, sha256_of_files(idx)])
    made_by = [tokenizer.sha256, tokenizer.eod_id]
    digest = sha256_of_json({"tokenizer": made_by, "files": contents})
    return TokenData("--data-path", tuple(domains), tokenizer, digest)


def split_range(split: str, part: Split) -> tuple[float, float]:
    """Where ``part`` begins and ends, as shares of all sequences, by Megatron's ``--split``.

    Raises:
        UserError: unless ``split`` is one to three numbers, not negative, of which that of
            ``part`` is above 0.
    """
    # No exponents: Megatron reads digits and dots alone.
    words = split.split(",")
    shares = [_number(word) if PLAIN_NUMBER.fullmatch(word.strip()) else None for word in words]
    if not 1 <= len(shares) <= len(SPLITS) or None in shares:
        raise UserError(f"--split {split}: up to three numbers with commas between, as 969,30,1")
    if min(share for share in shares if share is not None) < 0 or not any(shares):
        raise UserError(f"--split {split}: shares are not negative, and not all of them zero")
    bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    found = bounds[SPLITS.index(part)]
    if found is None:
        raise UserError(f"--split {split} leaves nothing for {part}; give it a share above 0")
    return float(found[0]), float(found[1])


def check_enough_tokens(data: TokenData, weights: Sequence[float], seq_length: int) -> None:
    """Refuse a domain that is to be drawn from but holds less than one sequence.

    Raises:
        UserError: naming the domain and what would help.
    """
    for domain, weight in zip(data.domains, weights, strict=True):
        if weight > 0 and domain.tokens < seq_length + 1:
            raise UserError(
                f"domain '{domain.name}' of {data.where} has {domain.tokens} tokens to train on, "
                f"fewer than one sequence of {seq_length}+1; use a shorter --seq-length, more "
                "text, or weight 0"
            )


def check_weights(data: TokenData, weights: Sequence[float]) -> None:
    """Refuse weights that nothing can be drawn by.

    Raises:
        UserError: unless there is one finite, non-negative weight per domain and one is positive.
    """
    if len(weights) != len(data.domains):
        raise UserError(
            f"{len(weights)} weights for the {len(data.domains)} domains of {data.where}; "
            "give one for each"
        )
    for name, weight in zip(data.names, weights, strict=True):
        if not math.isfinite(weight) or weight < 0:
            raise UserError(f"weight of '{name}' is {weight}; weights are finite and not negative")
    if not any(weights):
        raise UserError("all weights are zero; give at least one domain a weight")
    if not math.isfinite(sum(weights)):
        raise UserError("the weights are too large to add up; give shares of 1")


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
