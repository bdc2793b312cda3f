"""A tokenizer with its identity and its end-of-document token."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus, TokenizerIdentity
from megatron_chameleon.corpus.indexed import TokenType, token_type
from megatron_chameleon.corpus.tokenization.encoders import Encoder
from megatron_chameleon.corpus.tokenization.file import (
    TokenizerFile,
    read_tokenizer_file,
    recorded_tokenizer_file,
)
from megatron_chameleon.corpus.tokenization.long_texts import LONGEST_PART, parts
from megatron_chameleon.errors import UserError

_CANDIDATES_SHOWN = 10
_MOST_TOKENS = 2**31 - 1
# Of long texts; what the libraries hold of them is many times their size.
_CHARACTERS_AT_ONCE = 2_000_000
# Tokens of some texts, an end after each, and the length of each with its end, int64.
_Encoded = tuple[NDArray[np.integer], NDArray[np.int64]]


class StandIn(Protocol):
    """What encodes in the place of a tokenizer's own library when a corpus is made."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token ids of each text, [num_tokens] uint32, and nothing added."""
        ...

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]] | None:
        """Tokens of all texts, each with its end, and lengths; None where it cannot."""
        ...


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text in, token ids out.

    Attributes:
        file: all that decides the ids.
        encoder: the file's own library.
        eod_id: id of the end-of-document token.
        stand_in: encodes in the place of the own library, and gives the same ids.
    """

    file: TokenizerFile
    encoder: Encoder
    eod_id: int
    stand_in: StandIn | None = None

    @property
    def path(self) -> Path:
        """The file that was read."""
        return self.file.path

    @functools.cached_property
    def sha256(self) -> str:
        """Hex SHA-256 of all that decides the ids."""
        return self.file.sha256

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self.encoder.vocab_size

    @property
    def token_type(self) -> TokenType:
        """Integer type of a token on disk."""
        return token_type(self.vocab_size)

    @property
    def identity(self) -> TokenizerIdentity:
        """What a corpus records of it; ``file`` is the name of the corpus's own copy."""
        special = self.file.special_tokens
        return TokenizerIdentity(
            kind=self.file.kind,
            file=self.file.name,
            sha256=self.sha256,
            vocab_size=self.vocab_size,
            eod_id=self.eod_id,
            pattern=self.file.pattern,
            special_tokens=None if special is None else dict(special),
        )

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
        """Encode texts, each followed by the end-of-document token.

        A text of more than 500,000 characters is encoded in parts, whatever the library; see
        :func:`megatron_chameleon.corpus.tokenization.long_texts.parts`.

        Returns:
            tokens [num_tokens] of all texts one after the other, in :attr:`token_type`; and
            lengths [num_texts] int32, the tokens of each.

        Raises:
            UserError: if the library cannot encode a text.
        """
        is_long = max(map(len, texts), default=0) > LONGEST_PART
        tokens, lengths = self._encode_in_parts(texts) if is_long else self._encode(texts)
        _check_lengths(lengths)
        return tokens, lengths.astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.encoder.decode(ids)

    def save(self, folder: Path) -> None:
        """Write the file that a corpus keeps into ``folder``, called as ``identity`` says."""
        self.file.save(folder)

    def _encode(self, texts: Sequence[str]) -> _Encoded:
        together = None if self.stand_in is None else self.stand_in.encode_documents(texts)
        if together is not None:
            return together[0].astype(self.token_type), together[1]
        encoded = (self.stand_in or self.encoder).encode_batch(texts)
        end = np.array([self.eod_id], dtype=np.uint32)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) + 1
        _check_lengths(lengths)
        ended = [end[:0], *itertools.chain.from_iterable((ids, end) for ids in encoded)]
        # One copy of all, and to the type on disk.
        return np.concatenate(ended, dtype=self.token_type, casting="unsafe"), lengths

    def _encode_in_parts(self, texts: Sequence[str]) -> _Encoded:
        """The same where some texts are long: encode parts, and take out the ends within texts."""
        cut = [list(parts(text, self._drops_space)) for text in texts]
        encoded = [self._encode(group) for group in _groups(itertools.chain.from_iterable(cut))]
        tokens = np.concatenate([tokens for tokens, _ in encoded])
        lengths = np.concatenate([lengths for _, lengths in encoded])
        counts = np.array(list(map(len, cut)))
        is_inner = np.ones(lengths.size, dtype=bool)
        is_inner[np.cumsum(counts) - 1] = False
        tokens = np.delete(tokens, np.cumsum(lengths)[is_inner] - 1)
        return tokens, np.add.reduceat(lengths - is_inner, np.cumsum(counts) - counts)

    @functools.cached_property
    def _drops_space(self) -> bool:
        """Whether the tokens of 'a b' are those of 'a' and 'b', a space being put before each."""
        whole, first, second = self.encoder.encode_batch(["a b", "a", "b"])
        return np.array_equal(whole, np.concatenate([first, second]))


def _check_lengths(lengths: NDArray[np.int64]) -> None:
    longest = lengths.max(initial=0)
    if longest > _MOST_TOKENS:
        raise UserError(
            f"a document has {longest} tokens, more than the {_MOST_TOKENS} that the .idx format "
            "can tell; divide it"
        )


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in lists of at least two million characters; the last may have fewer."""
    group: list[str] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text)
        if characters >= _CHARACTERS_AT_ONCE:
            yield group
            group, characters = [], 0
    if group:
        yield group


def load_tokenizer(path: Path, eod_token: str, tiktoken_pattern: str | None = None) -> Tokenizer:
    """The tokenizer at ``path``.

    Args:
        path: see :func:`read_tokenizer_file`.
        eod_token: name of the token that ends documents.
        tiktoken_pattern: see EncoderOptions.

    Raises:
        UserError: if there is none, it cannot be read, or it has no token ``eod_token``.
    """
    file = read_tokenizer_file(path, tiktoken_pattern, eod_token)
    encoder = file.open()
    eod_id = encoder.token_id(eod_token)
    if eod_id is None:
        special = encoder.special_tokens()[:_CANDIDATES_SHOWN]
        raise UserError(
            f"{file.path} has no token '{eod_token}' to end documents with; its special tokens are "
            f"{', '.join(special) or '(none)'}: name one with --eod-token"
        )
    if eod_id in encoder.encode_batch([eod_token])[0]:
        warnings.warn(
            f"{file.path} finds '{eod_token}' in text, where it is not meant to end a document: it "
            "is not a special token there",
            stacklevel=2,
        )
    return Tokenizer(file, encoder, eod_id)


def corpus_tokenizer(corpus: Corpus, path: Path | None = None) -> Tokenizer:
    """The tokenizer that made ``corpus``: its own copy, or the same one at ``path``.

    Raises:
        UserError: if the file is missing or is not the one that made the tokens.
    """
    own = corpus.root / corpus.tokenizer.file
    file = recorded_tokenizer_file(own if path is None else path, corpus.tokenizer)
    if file.sha256 != corpus.tokenizer.sha256:
        raise UserError(
            f"{file.path} is not the tokenizer that made the corpus {corpus.root} (its hash "
            f"differs); use {own} as it was written, or preprocess again"
        )
    return Tokenizer(file, file.open(), corpus.tokenizer.eod_id)
