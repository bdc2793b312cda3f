"""A tokenizer file with its identity and its end-of-document token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus, TokenizerIdentity
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.corpus.encoders import (
    Encoder,
    JsonEncoder,
    SentencePieceEncoder,
    TokenizerKind,
)
from megatron_chameleon.errors import UserError

# The file's name inside a corpus, and inside a folder that is given for a file.
FILE_NAMES: dict[TokenizerKind, str] = {
    "tokenizers": "tokenizer.json",
    "sentencepiece": "tokenizer.model",
}
_CANDIDATES_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text in, token ids out.

    Attributes:
        path: the file.
        encoder: the library that reads it.
        eod_id: id of the end-of-document token.
        sha256: of the file.
    """

    path: Path
    encoder: Encoder
    eod_id: int
    sha256: str

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self.encoder.vocab_size

    @property
    def identity(self) -> TokenizerIdentity:
        """What a corpus records of it; ``file`` is the name of the corpus's own copy."""
        return TokenizerIdentity(
            kind=self.encoder.kind,
            file=FILE_NAMES[self.encoder.kind],
            sha256=self.sha256,
            vocab_size=self.vocab_size,
            eod_id=self.eod_id,
        )

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Ids of each text, [num_tokens] int32, the end-of-document token last."""
        encoded = self.encoder.encode_batch(texts)
        return [np.array([*ids, self.eod_id], dtype=np.int32) for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.encoder.decode(ids)


def load_tokenizer(path: Path, eod_token: str) -> Tokenizer:
    """The tokenizer at ``path``: a tokenizer.json, a .model, or a folder that holds one.

    Raises:
        UserError: if there is none, it cannot be read, or it has no token ``eod_token``.
    """
    file = _tokenizer_file(path)
    encoder = _open(file)
    eod_id = encoder.token_id(eod_token)
    if eod_id is None:
        special = encoder.special_tokens()[:_CANDIDATES_SHOWN]
        raise UserError(
            f"{file} has no token '{eod_token}' to end documents with; its special tokens are "
            f"{', '.join(special) or '(none)'}: name one with --eod-token"
        )
    return Tokenizer(file, encoder, eod_id, sha256_of_files(file))


def corpus_tokenizer(corpus: Corpus, path: Path | None = None) -> Tokenizer:
    """The tokenizer that made ``corpus``: its own copy, or the same one at ``path``.

    Raises:
        UserError: if the file is missing or is not the one that made the tokens.
    """
    own = corpus.root / corpus.tokenizer.file
    file = _tokenizer_file(own if path is None else path)
    sha256 = sha256_of_files(file)
    if sha256 != corpus.tokenizer.sha256:
        raise UserError(
            f"{file} is not the tokenizer that made the corpus {corpus.root} (its hash differs); "
            f"use {own} as it was written, or preprocess again"
        )
    return Tokenizer(file, _open(file), corpus.tokenizer.eod_id, sha256)


def _tokenizer_file(path: Path) -> Path:
    if path.is_dir():
        inside = [path / name for name in FILE_NAMES.values() if (path / name).is_file()]
        if len(inside) != 1:
            raise UserError(
                f"{path} holds {'both' if inside else 'neither'} of "
                f"{' and '.join(FILE_NAMES.values())}; name one file"
            )
        return inside[0]
    if not path.is_file():
        raise UserError(f"{path} does not exist; tools/train_tokenizer.py makes a tokenizer")
    return path


def _open(file: Path) -> Encoder:
    if file.suffix == ".json":
        return JsonEncoder(file)
    if file.suffix == ".model":
        return SentencePieceEncoder(file)
    raise UserError(
        f"{file}: a tokenizer is a tokenizer.json or a SentencePiece .model; "
        "tools/train_tokenizer.py makes either"
    )
