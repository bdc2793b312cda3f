"""Finding a tokenizer's file, telling its kind, and all that decides the ids it gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_chameleon.artifacts import TokenizerIdentity
from megatron_chameleon.artifacts.corpus import tokenizer_hash
from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.corpus.tokenization.encoders import (
    Encoder,
    JsonEncoder,
    SentencePieceEncoder,
    TokenizerKind,
)
from megatron_chameleon.corpus.tokenization.gpt2_files import (
    is_vocab_file,
    tokenizer_json_of,
    vocab_file_in,
)
from megatron_chameleon.corpus.tokenization.tiktoken_file import (
    TiktokenEncoder,
    is_tiktoken,
    pattern_and_special_tokens,
)
from megatron_chameleon.errors import UserError

# The file's name inside a corpus.
FILE_NAMES: Mapping[TokenizerKind, str] = MappingProxyType(
    {
        "tokenizers": "tokenizer.json",
        "sentencepiece": "tokenizer.model",
        "tiktoken": "tokenizer.tiktoken",
    }
)
# What is looked for in a folder that is given for a file.
_IN_A_FOLDER = ("tokenizer.json", "tokenizer.model", "*.tiktoken")


@dataclasses.dataclass(frozen=True)
class TokenizerFile:
    """All that decides the ids of a text.

    Attributes:
        path: what was read.
        kind: of the library that it is for.
        content: of the file that a corpus keeps, which differs from ``path`` where several files
            were made into one.
        pattern: how text is split into words, where the file does not say it.
        special_tokens: name -> id, where the file does not say it.
    """

    path: Path
    kind: TokenizerKind
    content: bytes = dataclasses.field(repr=False)
    pattern: str | None = None
    special_tokens: Mapping[str, int] | None = None

    @property
    def name(self) -> str:
        """What the file is called in a corpus."""
        return FILE_NAMES[self.kind]

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of all that decides the ids."""
        return tokenizer_hash(self.content, self.pattern, self.special_tokens)

    def open(self) -> Encoder:
        """The file in its own library. Raises UserError if it cannot be read there."""
        if self.kind == "tokenizers":
            return JsonEncoder(self.path, self.content)
        if self.kind == "sentencepiece":
            return SentencePieceEncoder(self.path, self.content)
        assert self.pattern is not None
        return TiktokenEncoder(self.path, self.content, self.pattern, self.special_tokens or {})

    def save(self, folder: Path) -> None:
        """Write the file that a corpus keeps into ``folder``."""
        with replacing(folder / self.name) as temporary:
            temporary.write_bytes(self.content)


def read_tokenizer_file(path: Path, tiktoken_pattern: str | None, eod_token: str) -> TokenizerFile:
    """The tokenizer at ``path``, a file or a folder that holds one.

    Args:
        path: a tokenizer.json, a vocab.json with its merges.txt beside it, a tiktoken file, a
            SentencePiece .model, or a folder.
        tiktoken_pattern: see EncoderOptions; refused for other files.
        eod_token: see :func:`pattern_and_special_tokens`.

    Raises:
        UserError: if there is none, its kind cannot be told, or its pattern is not known.
    """
    file = find_tokenizer_file(path)
    kind, content = kind_and_content(file)
    if kind == "tiktoken":
        pattern, special = pattern_and_special_tokens(file, content, tiktoken_pattern, eod_token)
        return TokenizerFile(file, kind, content, pattern, special)
    if tiktoken_pattern is not None:
        raise UserError(
            f"--tiktoken-pattern has no use here: {file} is not a tiktoken file; leave it out"
        )
    return TokenizerFile(file, kind, content)


def recorded_tokenizer_file(path: Path, identity: TokenizerIdentity) -> TokenizerFile:
    """The tokenizer at ``path``, with what a corpus has recorded of the one that made it."""
    file = find_tokenizer_file(path)
    kind, content = kind_and_content(file)
    return TokenizerFile(file, kind, content, identity.pattern, identity.special_tokens)


def find_tokenizer_file(path: Path) -> Path:
    """``path`` itself, or the one tokenizer in it if it is a folder.

    Raises:
        UserError: if there is none, or more than one.
    """
    if path.is_dir():
        inside = [file for name in _IN_A_FOLDER for file in sorted(path.glob(name))]
        if len(inside) > 1:
            names = ", ".join(file.name for file in inside)
            raise UserError(f"{path} holds more than one tokenizer ({names}); name one file")
        # A pair of files that came with a tokenizer.json was made into it.
        found = inside[0] if inside else vocab_file_in(path)
        if found is None:
            raise UserError(
                f"{path} holds no tokenizer: none of {', '.join(_IN_A_FOLDER)}, and no vocab.json "
                "with its merges.txt; name a file"
            )
        return found
    if not path.is_file():
        raise UserError(f"{path} does not exist; tools/train_tokenizer.py makes a tokenizer")
    return path


def kind_and_content(file: Path) -> tuple[TokenizerKind, bytes]:
    """Of which kind a file is, and what a corpus keeps of it.

    Raises:
        UserError: if it is of no known kind.
    """
    if is_vocab_file(file):
        return "tokenizers", tokenizer_json_of(file)
    content = file.read_bytes()
    if file.suffix == ".json":
        return "tokenizers", content
    # Llama 3's is called tokenizer.model too.
    if file.suffix == ".tiktoken" or is_tiktoken(content):
        return "tiktoken", content
    if file.suffix == ".model":
        return "sentencepiece", content
    raise UserError(
        f"{file}: a tokenizer is a tokenizer.json, a vocab.json with its merges.txt, a tiktoken "
        "file or a SentencePiece .model; tools/train_tokenizer.py makes the first or the last"
    )
