"""Domains: the named text that commands read, in a corpus, Megatron data sets, or raw text."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.artifacts import (
    SPLITS,
    Corpus,
    DomainSplit,
    EmbeddingRecipe,
    Split,
    TokenizerIdentity,
)
from megatron_chameleon.artifacts.corpus import hash_token_file
from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.corpus.data_path import DataPath, sequence_range, split_ranges
from megatron_chameleon.corpus.encode import TextEncoder, encode_in_batches, encoded_documents
from megatron_chameleon.corpus.indexed import (
    TokenFile,
    check_sequences,
    in_memory,
    open_token_file,
)
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.sample import Sample, require_text, sample_documents
from megatron_chameleon.corpus.sources import Source, find_sources, source_identity
from megatron_chameleon.corpus.tokenizer import Tokenizer, corpus_tokenizer
from megatron_chameleon.corpus.windows import Windows, draw_windows, split_at_documents
from megatron_chameleon.errors import UserError
from megatron_chameleon.storage import Location, concurrently, location

# Hashed into the key of the permutation that selects the documents of a cut domain.
_CUT = 2
# Characters per token in most text. The number decides how much raw text is read.
_CHARACTERS_PER_TOKEN = 4
_LONGEST_WORD = 32


class EncodesText(Protocol):
    """A model that text is encoded for."""

    def reads_ids_of(self, corpus: Corpus) -> bool:
        """Return whether the token ids of ``corpus`` mean the same to the model."""

    def open_encoder(self) -> TextEncoder:
        """Open the model's tokenizer."""


@dataclasses.dataclass(frozen=True)
class DomainTokens:
    """One split of a domain: sequences ``first`` to ``stop`` - 1 of a pair of .bin/.idx files.

    Indexing returns tokens by their positions in the .bin, which is opened when tokens are first
    read. So a domain can be sent to other ranks, which open files late. It has no length: the .bin
    may hold more tokens than ``tokens``.

    Attributes:
        name: name of the domain in weights and records.
        prefix: path or URL of the files, without their suffix.
        first: first sequence.
        stop: one past the last sequence.
        tokens: number of tokens in these sequences, or of those that a cut keeps.
        order_key: text that is hashed with the seed to get the order within the domain; it does not
            depend on paths.
        vocab_size: one more than the largest token id.
        sha256: identity of the files, from :func:`hash_token_file`; None if a corpus records them.
        dtype: type of a token, from corpus.json; None for files that the corpus does not hold.
        recorded: counts and checksums, from corpus.json; None for files that it does not hold.
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
    sha256: str | None = None
    dtype: str | None = None
    recorded: DomainSplit | None = None
    cache: Path | None = None
    uncut_tokens: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether only a fraction of the tokens is used (:meth:`Domains.cut`)."""
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

    def __getitem__(self, positions: NDArray[np.integer]) -> NDArray[np.integer]:
        return self.whole.tokens[positions]

    @functools.cached_property
    def whole(self) -> TokenFile:
        """The whole files that hold the sequences; raises UserError as :meth:`open`."""
        return self.open_whole()

    def __getstate__(self) -> dict[str, Any]:
        """The fields; a mapped file is not copied."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

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
        # Imported here, since it compiles loops with numba, which takes long to import.
        from megatron_chameleon.corpus.permutation import documents_with, permutation_key

        key = permutation_key(_CUT, self.order_number)
        kept = documents_with(file.lengths, self.tokens, np.uint64(key))
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
        if self.recorded or self.is_cut:
            return self.open()
        return self.open_whole().documents(self.first, self.stop)

    def open_whole(self) -> TokenFile:
        """Open the whole pair of files that holds the sequences.

        Raises:
            UserError: as :meth:`open`.
        """
        file = open_token_file(self.prefix, self.dtype, self.recorded, self.vocab_size, self.cache)
        check_sequences(file, self.first, self.stop, self.uncut_tokens or self.tokens)
        return file


@dataclasses.dataclass(frozen=True)
class Domains:
    """Domains with token files, in the order of their weights. No file is open.

    Attributes:
        names: the domains to train on.
        tokenizer: vocabulary and end-of-document token.
        splits: split -> domain -> its tokens; held-out domains, which have no weight, included.
        corpus: corpus of the domains; None for ``--data-path``.
        split: split that ``domains``, ``held_out`` and ``tokens`` list.
        encoder: opens the tokenizer of a model, if the text is to be encoded again for it.
    """

    names: list[str]
    tokenizer: TokenizerIdentity
    splits: Mapping[Split, Mapping[str, DomainTokens]]
    corpus: Corpus | None = None
    split: Split = "train"
    encoder: Callable[[], TextEncoder] | None = None

    is_raw = False

    @property
    def where(self) -> str:
        """Corpus folder or option that the user passed, for messages."""
        return "--data-path" if self.corpus is None else str(self.corpus.root)

    @functools.cached_property
    def domains(self) -> tuple[DomainTokens, ...]:
        """The tokens of each domain to train on, in the order of ``names``."""
        return tuple(self.splits[self.split][name] for name in self.names)

    @property
    def held_out(self) -> tuple[DomainTokens, ...]:
        """The tokens of each held-out domain of a corpus."""
        trained = set(self.names)
        return tuple(d for name, d in self.splits[self.split].items() if name not in trained)

    @property
    def tokens(self) -> dict[str, int]:
        """Domain to train on -> number of tokens in one epoch."""
        return {domain.name: domain.tokens for domain in self.domains}

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the contents, before a cut, independent of paths."""
        if self.corpus is not None:
            return self.corpus.hash
        files = [(d.first, d.stop, d.uncut_tokens or d.tokens, d.sha256) for d in self.domains]
        identity = {"tokenizer": [self.tokenizer.sha256, self.tokenizer.eod_id], "files": files}
        return sha256_of_json(identity)

    def domain_hash(self, name: str) -> str:
        """Hex SHA-256 of the token files of a domain of a corpus."""
        assert self.corpus is not None
        return self.corpus.domain_hash(name)

    def of(self, split: Split) -> Domains:
        """Return the same domains with their tokens of another split.

        Raises:
            UserError: if ``--split`` leaves nothing for it.
        """
        if split not in self.splits:
            raise UserError(f"--split leaves nothing for {split}; its share must be above 0")
        return dataclasses.replace(self, split=split)

    def open(self, name: str, split: Split | None = None) -> TokenFile:
        """Open the documents of a domain; held-out domains included.

        Raises:
            UserError: as :meth:`DomainTokens.open`.
        """
        return self.splits[split or self.split][name].open_documents()

    def cut(self, run_tokens: int, target_tokens: int | None) -> Domains:
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
        cut = {
            domain.name: dataclasses.replace(
                domain,
                tokens=domain.tokens * run_tokens // target_tokens,
                uncut_tokens=domain.tokens,
            )
            for domain in self.domains
        }
        whole = self.splits[self.split]
        return dataclasses.replace(self, splits={**self.splits, self.split: {**whole, **cut}})

    def encoded_for(self, model: EncodesText) -> Domains:
        """Return these domains; they are encoded again if ``model`` reads other ids.

        Raises:
            UserError: if the model reads other ids, and text cannot be decoded, or encoded for it.
        """
        assert self.corpus is not None
        if model.reads_ids_of(self.corpus):
            return self
        corpus_tokenizer(self.corpus)  # fails early if the corpus has lost its tokenizer
        return dataclasses.replace(self, encoder=model.open_encoder)

    @property
    def is_reencoded(self) -> bool:
        """Whether the tokens are not yet those of the model (:meth:`encode_again`)."""
        return self.encoder is not None

    @property
    def ids_hash(self) -> str:
        """Hex SHA-256 of everything that determines the ids of the text for the model."""
        own = self.tokenizer.sha256
        return own if self.encoder is None else sha256_of_json([own, self.encoder().sha256])

    def open_encoder(self) -> TextEncoder:
        """Open the tokenizer of the model's ids.

        Raises:
            UserError: if it is missing or damaged.
        """
        if self.encoder is not None:
            return self.encoder()
        assert self.corpus is not None
        return corpus_tokenizer(self.corpus)

    def encode_again(self, tokens: TokenFile, windows: Windows, *, by_document: bool) -> TokenFile:
        """Decode ``windows``, and encode their text for the model. Other text is not decoded.

        Args:
            tokens: tokens of a domain.
            windows: windows of these tokens.
            by_document: join the windows of a document into one document.

        Returns:
            One document per document of the corpus, or per window in it, in the order of the
            corpus.
        """
        decoder, encoder = self._coders
        windows = split_at_documents(windows, tokens.lengths)
        order = np.lexsort((windows.start, windows.document))
        document = windows.document[order]
        places = zip(
            document.tolist(),
            windows.start[order].tolist(),
            windows.length[order].tolist(),
            strict=True,
        )
        texts = []
        for place in places:
            ids = tokens.get(*place)
            texts.append(decoder.decode(ids[ids != decoder.eod_id].tolist()))
        ids, lengths = encode_in_batches(encoder, texts)
        if by_document:
            firsts = np.flatnonzero(np.diff(document, prepend=-1))
            lengths = np.add.reduceat(lengths, firsts, dtype=np.int32)
        return in_memory(tokens.prefix, ids, lengths)

    @functools.cached_property
    def _coders(self) -> tuple[Tokenizer, TextEncoder]:
        assert self.corpus is not None
        return corpus_tokenizer(self.corpus), self.open_encoder()

    def check(self, names: Iterable[str]) -> None:
        """Do nothing: token files are checked when they are opened."""

    def summary(self) -> list[str]:
        """Return nothing: token files are read where tokens are needed."""
        return []


def open_domains(corpus: Corpus, cache: Path | None = None) -> Domains:
    """Return the domains of a corpus. No file is opened.

    An imported domain has the samples that it has as a data set of ``--data-path``. ``cache`` is
    the folder of the local copies of remote files; None is the default folder.
    """
    splits: dict[Split, dict[str, DomainTokens]] = {}
    for split in SPLITS:
        keys, splits[split] = _OrderKeys(), {}
        for name, domain in corpus.all_domains.items():
            part, file = domain.split(split), domain.imported
            first, stop = part.sequences or (0, part.documents)
            splits[split][name] = DomainTokens(
                name,
                corpus.prefix(name, split),
                first,
                stop,
                part.tokens,
                order_key=keys.of_file(file.sha256) if file else name,
                vocab_size=corpus.tokenizer.vocab_size,
                sha256=file.sha256 if file else None,
                dtype=None if file else corpus.dtype,
                recorded=None if file else part,
                cache=cache,
            )
    return Domains(corpus.names, corpus.tokenizer, splits, corpus)


def open_data_path(
    path: DataPath, split: str, tokenizer: TokenizerIdentity, cache: Path | None = None
) -> Domains:
    """Open Megatron data sets once, and divide them by ``--split`` as in Megatron-LM.

    The hash and the order of the samples depend on the contents (:func:`hash_token_file`), not on
    the paths. Splits whose share is 0 are left out. ``cache`` is the folder of the local copies of
    remote files; None is the default folder.

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

    keys, splits = _OrderKeys(), {part: dict[str, DomainTokens]() for part in ranges}
    found = concurrently(read, path.prefixes)
    for name, prefix, (sha256, counts) in zip(path.names, path.prefixes, found, strict=True):
        order_key = keys.of_file(sha256)
        for part, (first, stop, tokens) in counts.items():
            splits[part][name] = DomainTokens(
                name,
                location(prefix),
                first,
                stop,
                tokens,
                order_key,
                tokenizer.vocab_size,
                sha256,
                cache=cache,
            )
    return Domains(list(path.names), tokenizer, splits)


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


def _unaligned(array: NDArray[Any]) -> NDArray[Any]:
    """Copy to a read-only array at an unaligned address.

    The arrays of an .idx file have this type. For another type, numba would compile the loops that
    read samples once more, which takes several seconds.
    """
    return np.frombuffer(bytes(2) + array.tobytes(), array.dtype, offset=2)


def describe_cut(run_tokens: int, target_tokens: int | None) -> list[str]:
    """Return a line that describes :meth:`Domains.cut`, or no line without a cut."""
    if target_tokens is None or target_tokens == run_tokens:
        return []
    return [
        f"each domain is cut to {100 * run_tokens / target_tokens:.3g}% of its training tokens, so "
        f"that epochs equal those of a run of {target_tokens:,} tokens"
    ]


def load_windows(
    domain: DomainTokens, window_length: int, num_windows: int, seed: int
) -> tuple[TokenFile, Windows]:
    """Sample windows of ``domain`` with :func:`draw_windows`, and read them into memory.

    The sample depends only on ``seed`` and the domain's ``order_key``, not on where its files are.

    Args:
        domain: domain with at least one token.
        window_length: tokens per window.
        num_windows: maximum number of windows.
        seed: seed of the sample.

    Returns:
        Tokens of these windows only, one document per window, and the windows.

    Raises:
        UserError: if the tokens are damaged or outside the vocabulary.
    """
    file = domain.open_documents()
    sampled = draw_windows(file.lengths, window_length, num_windows, seed, domain.order_key)
    first = file.starts[sampled.document] + sampled.start
    places = zip(first.tolist(), (first + sampled.length).tolist(), strict=True)
    tokens = np.concatenate([file.tokens[start:stop] for start, stop in places])
    document = np.arange(len(sampled))
    file = in_memory(file.prefix, tokens, sampled.length.astype(np.int32))
    return file, Windows(document, np.zeros_like(document), sampled.length)


@dataclasses.dataclass(frozen=True)
class RawText:
    """The domains of ``--input``, of which documents are sampled, and encoded for a model.

    If the sampled documents have more than twice the text that is embedded, only excerpts of them
    are encoded.

    A domain is identified by the names, sizes, modification times and ETags of its files, so
    domains whose vectors are stored need not be read again.

    Attributes:
        source: options of the text.
        sources: domain -> its files or shards of data sets.
        encoder: opens the model's tokenizer; None until :meth:`encoded_for`.
        recipe: number, length and seed of the windows to sample; None if none are sampled.
        read: domain -> its sample, without the texts.
    """

    source: SourceOptions
    sources: dict[str, list[Source]]
    encoder: Callable[[], TextEncoder] | None = None
    recipe: EmbeddingRecipe | None = None
    read: dict[str, Sample] = dataclasses.field(default_factory=dict)

    is_raw = True
    is_reencoded = False
    where = "--input"

    @property
    def names(self) -> list[str]:
        """The domains, in the order of ``--input``."""
        return list(self.sources)

    @property
    def hash(self) -> str:
        """Hash of the identities of all domains."""
        return sha256_of_json([[name, self.domain_hash(name)] for name in self.names])

    def domain_hash(self, name: str) -> str:
        """Hash of the sources' names and states, and of the options that select text."""
        files = [source_identity(source) for source in self.sources[name]]
        return sha256_of_json(
            {"files": files, "keys": [self.source.text_key, self.source.max_document_bytes]}
        )

    def encoded_for(self, model: EncodesText) -> RawText:
        """Return the same text, encoded by the tokenizer of ``model``."""
        return dataclasses.replace(self, encoder=model.open_encoder)

    @property
    def ids_hash(self) -> str:
        """Hex SHA-256 of everything that determines the ids of the text."""
        return self.open_encoder().sha256

    def open_encoder(self) -> TextEncoder:
        """Open the model's tokenizer.

        Raises:
            UserError: if it is missing or damaged.
        """
        assert self.encoder is not None
        return self.encoder()

    def check(self, names: Iterable[str]) -> None:
        """Read the first document of each of ``names``, so that mistakes are found early.

        Raises:
            UserError: if a domain has no text, or its lines lack the text key.
        """
        for name in names:
            require_text(self.source, self.sources[name], name)

    def open(self, name: str, split: Split | None = None) -> TokenFile:
        """Sample documents of a domain by the recipe, and encode them."""
        assert split in (None, "train"), "raw text is not split"
        recipe = self.recipe
        assert recipe is not None
        # Twice as much text as is embedded, so that few windows come from the same document.
        documents = 2 * recipe.num_windows
        limit = documents * recipe.window_length * _CHARACTERS_PER_TOKEN
        sources = self.sources[name]
        sample = sample_documents(self.source, sources, name, documents, limit, recipe.seed)
        texts = sample.texts
        if sum(map(len, texts)) > limit:
            texts = _excerpts(texts, recipe, name)
        self.read[name] = dataclasses.replace(sample, texts=[])
        return encoded_documents(Path(name), self._opened_encoder, texts)

    def encode_again(self, tokens: TokenFile, windows: Windows, *, by_document: bool) -> TokenFile:
        """Return ``tokens``, which are those of the model."""
        return tokens

    @functools.cached_property
    def _opened_encoder(self) -> TextEncoder:
        return self.open_encoder()

    def summary(self) -> list[str]:
        """Describe what was read of each domain, as in 'web 9,120 documents (67MB of 1.0TB)'."""
        size = functools.partial(tqdm.format_sizeof, suffix="B", divisor=1000)
        return [
            f"{name} {read.documents_read:,} documents"
            + (
                f" ({size(read.bytes_read)} of {size(read.bytes_total)})"
                if read.bytes_total
                else ""
            )
            for name, read in self.read.items()
        ]


def find_raw_text(source: SourceOptions) -> RawText:
    """Find the files of ``--input``, without reading them.

    Raises:
        UserError: if an input has no domain, no readable files, or cannot be reached.
    """
    sources: dict[str, list[Source]] = {}
    for found in find_sources(source):
        if found.domain is None:
            raise UserError(f"--input: {found.name} has no domain; pass it as NAME=PATH")
        sources.setdefault(found.domain, []).append(found)
    return RawText(source, sources)


def _excerpts(texts: Sequence[str], recipe: EmbeddingRecipe, name: str) -> list[str]:
    """Sample ``num_windows`` excerpts of about the text of a window, or of two.

    So the amount of text that is encoded does not depend on the length of the documents. Windows
    across documents need twice the text: they all have the same length, although some text has
    fewer tokens than expected.
    """
    is_across = recipe.cross_documents
    length = recipe.window_length * _CHARACTERS_PER_TOKEN * (2 if is_across else 1)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    windows = draw_windows(
        lengths, length, recipe.num_windows, recipe.seed, name, within_documents=not is_across
    )
    windows = split_at_documents(windows, lengths)
    places = zip(
        windows.document.tolist(), windows.start.tolist(), windows.length.tolist(), strict=True
    )
    return [
        texts[document][_word_start(texts[document], start) : _word_start(texts[document], stop)]
        for document, start, stop in ((d, start, start + length) for d, start, length in places)
    ]


def _word_start(text: str, position: int) -> int:
    """Return the first space from ``position`` on, if one is near; otherwise ``position``."""
    if 0 < position < len(text):
        space = text.find(" ", position, position + _LONGEST_WORD)
        return position if space < 0 else space
    return position
