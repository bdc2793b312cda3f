"""The token files of each domain of a run, and checks of the domains' weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus, Split, TokenizerIdentity
from megatron_chameleon.artifacts.corpus import hash_token_file
from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.blend.gather import documents_with, permutation_key
from megatron_chameleon.corpus.data_path import (
    DataPath,
    sequence_range,
    split_range,
    split_ranges,
)
from megatron_chameleon.corpus.indexed import (
    BlockTokens,
    ExpectedTokens,
    TokenFile,
    check_sequences,
    expected_tokens,
    open_token_file,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.storage import Location, concurrently, location

MAX_DOMAINS = int(np.iinfo(np.int16).max)
"""Domain numbers are int16, as in Megatron's blended index."""
# Hashed into the key of the permutation that selects the documents of a cut domain.
_CUT = 2


@dataclasses.dataclass(frozen=True)
class DomainData:
    """The sequences of one domain: ``first`` to ``stop`` of a pair of .bin/.idx files.

    Attributes:
        name: name of the domain in weights and records.
        prefix: path or URL of the files, without their suffix.
        first: first sequence.
        stop: one past the last sequence.
        tokens: number of tokens in these sequences, or of those that a cut keeps.
        order_key: text that is hashed with the seed to get the order within the domain; it does not
            depend on paths.
        vocab_size: one more than the largest token id.
        expected: dtype, counts and checksums from corpus.json; None for other files.
        cache: folder of the local copies of remote files; None for the default folder.
        uncut_tokens: number of tokens in these sequences before a cut; None without a cut.
    """

    name: str
    prefix: Location
    first: int
    stop: int
    tokens: int
    order_key: str
    vocab_size: int
    expected: ExpectedTokens | None = None
    cache: Path | None = None
    uncut_tokens: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether only a fraction of the tokens is used (:meth:`TokenData.cut`)."""
        return self.uncut_tokens is not None

    @property
    def order_number(self) -> int:
        """Hash of ``order_key``: the order does not depend on the domain's position in a blend."""
        return int.from_bytes(hashlib.sha256(self.order_key.encode("utf-8")).digest()[:4])

    @property
    def approximate_sequences(self) -> int:
        """Number of sequences; of a cut domain, an estimate that needs no file."""
        kept = self.tokens / self.uncut_tokens if self.uncut_tokens else 1.0
        return math.ceil((self.stop - self.first) * kept)

    def open(self) -> TokenFile:
        """Open the sequences of this domain, and check the whole file that holds them.

        Of a cut domain, the sequences are the first ones of a fixed shuffle, in shuffled order. The
        last of them is shortened at its beginning, so that it still ends with its end-of-document
        token, and the number of tokens is exactly ``tokens``.

        Raises:
            UserError: if it is damaged, has changed, or has an unsupported token type.
        """
        file = self.open_whole().part(self.first, self.stop)
        if not self.is_cut:
            return file
        kept = documents_with(
            file.lengths, self.tokens, np.uint64(permutation_key(_CUT, self.order_number))
        )
        lengths, pointers = file.lengths[kept], file.pointers[kept]
        surplus = int(lengths.sum(dtype=np.int64)) - self.tokens
        lengths[-1] -= surplus
        pointers[-1] += surplus * file.dtype.itemsize
        boundaries = np.arange(len(kept) + 1)
        return TokenFile(
            file.prefix, file.tokens, _unaligned(lengths), _unaligned(pointers), boundaries
        )

    def open_documents(self) -> TokenFile:
        """Open the sequences of this domain, joined to documents unless the domain is cut.

        Raises:
            UserError: as :meth:`open`.
        """
        if self.expected or self.is_cut:
            return self.open()
        return self.open_whole().documents(self.first, self.stop)

    def open_whole(self) -> TokenFile:
        """Open the whole pair of files that holds the sequences.

        Raises:
            UserError: as :meth:`open`.
        """
        file = open_token_file(self.prefix, self.expected, self.vocab_size, self.cache)
        check_sequences(file, self.first, self.stop, self.uncut_tokens or self.tokens)
        return file


class DomainTokens:
    """Tokens of the .bin file of a domain, which is opened when they are first read."""

    def __init__(self, domain: DomainData) -> None:
        self._domain = domain

    @functools.cached_property
    def _tokens(self) -> BlockTokens:
        return self._domain.open().tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, key: NDArray[np.integer]) -> NDArray[np.integer]:
        return self._tokens[key]


@dataclasses.dataclass(frozen=True)
class TokenData:
    """All domains of a run, in the order of its weights.

    Attributes:
        where: corpus folder or option that the user passed, for messages.
        domains: the sequences of each domain.
        tokenizer: vocabulary and end-of-document token.
        hash: hex SHA-256 of the contents, independent of paths.
        held_out: the held-out domains of a corpus, which have no weight and no training text.
    """

    where: str
    domains: tuple[DomainData, ...]
    tokenizer: TokenizerIdentity
    hash: str
    held_out: tuple[DomainData, ...] = ()

    @property
    def names(self) -> list[str]:
        """Domain names, in the order of the weights."""
        return [domain.name for domain in self.domains]

    @property
    def tokens(self) -> dict[str, int]:
        """Domain -> number of tokens in one epoch."""
        return {domain.name: domain.tokens for domain in self.domains}

    def cut(self, run_tokens: int, target_tokens: int | None) -> TokenData:
        """Cut each domain, so that a proxy repeats it as often as the target run repeats all of it.

        With weight w, a run of T tokens has w T / N epochs of a domain of N tokens, so a proxy of P
        tokens has as many epochs of N P / T tokens, for any w. (The same idea in levanter is called
        simulated epoching.) The choice of the documents depends only on the domain, and a smaller
        cut is contained in a larger cut. ``hash`` is that of the whole text.

        Args:
            run_tokens: P, training tokens of the proxy.
            target_tokens: T, training tokens of the target run; None keeps all text.

        Raises:
            UserError: if the target run has fewer tokens than the proxy.
        """
        if target_tokens is None or target_tokens == run_tokens:
            return self
        if target_tokens < run_tokens:
            raise UserError(
                f"--target-tokens {target_tokens}: must be >= {run_tokens}, the number of tokens "
                "that the proxy is trained on"
            )
        domains = (
            dataclasses.replace(
                domain,
                tokens=domain.tokens * run_tokens // target_tokens,
                uncut_tokens=domain.tokens,
            )
            for domain in self.domains
        )
        return dataclasses.replace(self, domains=tuple(domains))


def corpus_tokens(corpus: Corpus, split: Split = "train", cache: Path | None = None) -> TokenData:
    """Return one split of every domain of a corpus, held-out domains included.

    An imported domain has the samples that it has as a data set of ``--data-path``. ``cache`` is
    the folder of the local copies of remote files.
    """
    keys = _OrderKeys()

    def open_domain(name: str) -> DomainData:
        part, file = corpus.all_domains[name].split(split), corpus.all_domains[name].imported
        first, stop = part.sequences or (0, part.documents)
        return DomainData(
            name,
            corpus.prefix(name, split),
            first=first,
            stop=stop,
            tokens=part.tokens,
            order_key=keys.of_file(file.sha256) if file else name,
            vocab_size=corpus.tokenizer.vocab_size,
            expected=expected_tokens(corpus, part),
            cache=cache,
        )

    return TokenData(
        str(corpus.root),
        tuple(map(open_domain, corpus.domains)),
        corpus.tokenizer,
        corpus.hash,
        tuple(map(open_domain, corpus.held_out)),
    )


def data_path_tokens(
    path: DataPath,
    split: str,
    tokenizer: TokenizerIdentity,
    part: Split = "train",
    cache: Path | None = None,
) -> TokenData:
    """Select one split of Megatron data sets (:func:`data_path_splits`).

    Raises:
        UserError: for damaged files, or a split that leaves nothing for ``part``.
    """
    split_range(split, part)  # raises if nothing is left
    return data_path_splits(path, split, tokenizer, cache)[part]


def data_path_splits(
    path: DataPath, split: str, tokenizer: TokenizerIdentity, cache: Path | None = None
) -> dict[Split, TokenData]:
    """Open Megatron data sets once, and divide them by ``--split`` as in Megatron-LM.

    The hash and the order of the samples depend on the contents (:func:`hash_token_file`), not on
    the paths. ``cache`` is the folder of the local copies of remote files.

    Returns:
        Tokens of each split whose share is above 0.

    Raises:
        UserError: for damaged files, or an invalid split.
    """
    ranges = {part: bounds for part, bounds in split_ranges(split).items() if bounds}

    def read(prefix: str) -> tuple[str, dict[Split, tuple[int, int, int]]]:
        """Return the hash of the files; each split's first and end sequence, and its tokens."""
        file = open_token_file(location(prefix), cache=cache)
        counts: dict[Split, tuple[int, int, int]] = {}
        for part, bounds in ranges.items():
            first, stop = sequence_range(len(file), bounds)
            counts[part] = first, stop, file.num_tokens(first, stop)
        return hash_token_file(location(prefix), cache), counts

    found = concurrently(read, path.prefixes)
    keys = _OrderKeys()
    order_keys = [keys.of_file(sha256) for sha256, _ in found]
    splits = {}
    for part in ranges:
        cuts = [(*counts[part], sha256) for sha256, counts in found]
        domains = (
            DomainData(
                name,
                location(prefix),
                first,
                stop,
                tokens,
                order_key,
                tokenizer.vocab_size,
                cache=cache,
            )
            for name, prefix, order_key, (first, stop, tokens, _) in zip(
                path.names, path.prefixes, order_keys, cuts, strict=True
            )
        )
        identity = {"tokenizer": [tokenizer.sha256, tokenizer.eod_id], "files": cuts}
        sha256 = sha256_of_json(identity)
        splits[part] = TokenData("--data-path", tuple(domains), tokenizer, sha256)
    return splits


def _unaligned(array: NDArray[Any]) -> NDArray[Any]:
    """Copy to a read-only array at an unaligned address.

    The arrays of an .idx file have this type. For another type, numba would compile the loops that
    read samples once more, which takes several seconds.
    """
    return np.frombuffer(bytes(2) + array.tobytes(), array.dtype, offset=2)


class _OrderKeys:
    """Order keys of files that a corpus did not write, from the hashes of these files.

    Copies of a file are numbered, so that they get different sample orders.
    """

    def __init__(self) -> None:
        self._copies: Counter[str] = Counter()

    def of_file(self, sha256: str) -> str:
        """Return the key of the next file with this hash."""
        self._copies[sha256] += 1
        return f"{sha256} {self._copies[sha256] - 1}"


def describe_cut(run_tokens: int, target_tokens: int | None) -> list[str]:
    """Return a line that describes :meth:`TokenData.cut`, or no line without a cut."""
    if target_tokens is None or target_tokens == run_tokens:
        return []
    return [
        f"each domain is cut to {100 * run_tokens / target_tokens:.3g}% of its training tokens, so "
        f"that epochs equal those of a run of {target_tokens:,} tokens"
    ]


def check_enough_tokens(data: TokenData, weights: Sequence[float], seq_length: int) -> None:
    """Check that every domain with a weight holds at least one sequence.

    Raises:
        UserError: if one does not; the message names the first such domain.
    """
    for domain, weight in zip(data.domains, weights, strict=True):
        if weight > 0 and domain.tokens < seq_length + 1:
            found, hint = f"has {domain.tokens} tokens to train on", "more text"
            if domain.is_cut:
                found = f"is cut to {domain.tokens} of its {domain.uncut_tokens:,} tokens"
                hint = "more training steps, a smaller --target-tokens"
            raise UserError(
                f"domain '{domain.name}' of {data.where} {found}, fewer than one sequence of "
                f"{seq_length}+1; use a shorter --seq-length, {hint}, or weight 0"
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
