"""The text of domains to embed: a corpus, or a sample of raw text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from tqdm import tqdm

from megatron_chameleon.artifacts import Corpus, EmbeddingRecipe, Split
from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.corpus.encode import TextEncoder, encode_in_batches, encoded_documents
from megatron_chameleon.corpus.indexed import TokenFile, in_memory, open_tokens
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.sample import Sample, require_text, sample_documents
from megatron_chameleon.corpus.sources import Source, find_sources, source_identity
from megatron_chameleon.corpus.tokenizer import Tokenizer, corpus_tokenizer
from megatron_chameleon.embedding.windows import (
    Windows,
    draw_windows,
    split_at_documents,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import from_main

# Characters per token in most text. The number decides how much raw text is read.
_CHARACTERS_PER_TOKEN = 4
_LONGEST_WORD = 32


class DomainText(Protocol):
    """Text of domains, as token ids of the proxy."""

    @property
    def where(self) -> str:
        """Location of the text, for messages."""

    @property
    def names(self) -> list[str]:
        """The domains."""

    @property
    def hash(self) -> str:
        """Hex SHA-256 that identifies the text of all domains."""

    def domain_hash(self, name: str) -> str:
        """Hex SHA-256 that identifies the text of the domain ``name``."""

    def tokens(self, name: str, split: Split) -> TokenFile:
        """Open the documents of one split of a domain. Collective.

        Raises:
            UserError: if the text cannot be read.
        """


@dataclasses.dataclass(frozen=True)
class CorpusText:
    """The text of a corpus that was made with the proxy's tokenizer.

    The hash and the tokens of the corpus's held-out domains are available too.
    """

    corpus: Corpus

    @property
    def where(self) -> str:
        """The corpus's folder."""
        return str(self.corpus.root)

    @property
    def names(self) -> list[str]:
        """The domains, in the corpus's order."""
        return self.corpus.names

    @property
    def hash(self) -> str:
        """The corpus's hash."""
        return self.corpus.hash

    def domain_hash(self, name: str) -> str:
        """Hash of the domain's token files."""
        return self.corpus.domain_hash(name)

    def tokens(self, name: str, split: Split) -> TokenFile:
        """Map the token files."""
        return open_tokens(self.corpus, name, split)


@dataclasses.dataclass(frozen=True)
class DecodedCorpusText(CorpusText):
    """The text of a corpus that was made with another tokenizer than the proxy's.

    Windows are chosen from the corpus's tokens, decoded, and encoded by the proxy's tokenizer; the
    windows to embed are chosen from the result. So most text that is not embedded is not decoded.

    Attributes:
        open_encoder: opens the proxy's tokenizer.
    """

    open_encoder: Callable[[], TextEncoder]

    def encode(self, tokens: TokenFile, windows: Windows, *, by_document: bool) -> TokenFile:
        """Encode the text of ``windows`` on rank 0, and broadcast its tokens. Collective.

        Args:
            tokens: tokens of the corpus.
            windows: windows of these tokens.
            by_document: join the windows of a document into one document.

        Returns:
            One document per document of the corpus, or per window in it, in the order of the
            corpus.
        """
        return from_main(lambda: self._encode(tokens, windows, by_document=by_document))

    @functools.cached_property
    def _tokenizers(self) -> tuple[Tokenizer, TextEncoder]:
        return corpus_tokenizer(self.corpus), self.open_encoder()

    def _encode(self, tokens: TokenFile, windows: Windows, *, by_document: bool) -> TokenFile:
        decoder, encoder = self._tokenizers
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


@dataclasses.dataclass(frozen=True)
class SampledText:
    """Documents sampled from raw text and encoded with the proxy's tokenizer.

    If the sampled documents have more than twice the text that is embedded, only excerpts of them
    are encoded.

    A domain is identified by the names, sizes, modification times and ETags of its files, so
    domains whose vectors are stored need not be read again.

    Attributes:
        source: options of the text.
        sources: domain -> its files or shards of data sets.
        open_encoder: opens the proxy's tokenizer.
        recipe: number, length and seed of the windows to sample.
        read: domain -> its sample, without the texts; on rank 0.
    """

    source: SourceOptions
    sources: dict[str, list[Source]]
    open_encoder: Callable[[], TextEncoder]
    recipe: EmbeddingRecipe
    where: str = "--input"
    read: dict[str, Sample] = dataclasses.field(default_factory=dict)

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

    def check(self, names: Iterable[str]) -> None:
        """Read the first document of each of ``names``, so that mistakes are found early.

        Raises:
            UserError: if a domain has no text, or its lines lack the text key.
        """
        for name in names:
            require_text(self.source, self.sources[name], name)

    def tokens(self, name: str, split: Split) -> TokenFile:
        """Sample and encode documents on rank 0, and broadcast their tokens."""
        assert split == "train", "raw text is not split"
        return from_main(lambda: self._sample(name))

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

    @functools.cached_property
    def _encoder(self) -> TextEncoder:
        return self.open_encoder()

    def _sample(self, name: str) -> TokenFile:
        recipe = self.recipe
        # Twice as much text as is embedded, so that few windows come from the same document.
        documents = 2 * recipe.num_windows
        limit = documents * recipe.window_length * _CHARACTERS_PER_TOKEN
        sources = self.sources[name]
        sample = sample_documents(self.source, sources, name, documents, limit, recipe.seed)
        texts = sample.texts
        if sum(map(len, texts)) > limit:
            texts = _excerpts(texts, recipe, name)
        self.read[name] = dataclasses.replace(sample, texts=[])
        return encoded_documents(Path(name), self._encoder, texts)


def find_text(
    source: SourceOptions, open_encoder: Callable[[], TextEncoder], recipe: EmbeddingRecipe
) -> SampledText:
    """Find the files of ``--input``, without reading them.

    Raises:
        UserError: if an input has no domain, no readable files, or cannot be reached.
    """
    sources: dict[str, list[Source]] = {}
    for found in find_sources(source):
        if found.domain is None:
            raise UserError(f"--input: {found.name} has no domain; pass it as NAME=PATH")
        sources.setdefault(found.domain, []).append(found)
    return SampledText(source, sources, open_encoder, recipe)


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
