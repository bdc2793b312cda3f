"""Tokenizers: their files in every supported format, and encoding documents.

A tiktoken file contains neither the pattern that splits text into words nor the special tokens.
Both are built in for the published files; other files need ``--tiktoken-pattern``.
"""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import sentencepiece
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from megatron_chameleon.artifacts import Corpus, TokenizerIdentity
from megatron_chameleon.artifacts.corpus import tokenizer_hash
from megatron_chameleon.artifacts.files import read_foreign_json, replacing
from megatron_chameleon.corpus.indexed import TokenType, token_type
from megatron_chameleon.errors import UserError, one_line

if TYPE_CHECKING:
    from megatron_chameleon.corpus.gigatoken import GigatokenEncoder

TokenizerKind = Literal["tokenizers", "sentencepiece", "tiktoken"]

# Name of the file inside a corpus.
FILE_NAMES: Mapping[TokenizerKind, str] = {
    "tokenizers": "tokenizer.json",
    "sentencepiece": "tokenizer.model",
    "tiktoken": "tokenizer.tiktoken",
}
# File names searched in a folder.
_IN_A_FOLDER = ("tokenizer.json", "tokenizer.model", "*.tiktoken")
# File name of GPT-2's vocabulary -> file name of its merges. The first pair is used by
# transformers, and with a prefix by Megatron-LM; the second is from the first release of GPT-2.
_GPT2_NAMES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}
_CANDIDATES_SHOWN = 10
_MOST_TOKENS = 2**31 - 1

# Longer texts are encoded in parts: tokenizers takes about 100 bytes of memory a character, and
# tiktoken fails on a million spaces in a row. Parts are long, since tokens at their boundaries may
# differ from those of the whole text.
LONGEST_PART = 500_000
# Number of characters before the end of a part that are searched for a boundary.
_WINDOW = 4096
# Places at which a long text may be cut, the best first: at a space between two words, at the last
# of several spaces, or after a line break. Every known pre-tokenizer splits at these places too.
_BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")
_PLACES = (_BETWEEN_WORDS, re.compile(r"(?= \S)"), re.compile(r"(?<=\S\n)(?=\S)"))
# Number of parts encoded at once; encoding takes many times the memory of the text.
_PARTS_AT_ONCE = 4
# Tokens of several texts, with an end-of-document token after each text, and the number of tokens
# of each text.
_Encoded = tuple[NDArray[np.integer], NDArray[np.int64]]

# tiktoken
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
# Pre-tokenization regular expressions by encoding name.
PATTERNS: Mapping[str, str] = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k_base": _WORDS + r"|\s+$" + _SPACE,
    "o200k_base": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACE
    ),
    # Like cl100k_base except for white space at the end of the text.
    "llama3": _WORDS + _SPACE,
}
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?(?:\n|\Z)")
DEFAULT_EOD_TOKEN = "<|endoftext|>"


class PublishedFile(NamedTuple):
    """A published tiktoken file: the name of its pattern, and its special tokens."""

    pattern: str
    special_tokens: Mapping[str, int]


_GPT2 = PublishedFile("gpt2", {DEFAULT_EOD_TOKEN: 50_256})
_CL100K_NAMES = (DEFAULT_EOD_TOKEN, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_CL100K = PublishedFile(
    "cl100k_base",
    {name: 100_257 + i for i, name in enumerate(_CL100K_NAMES)} | {"<|endofprompt|>": 100_276},
)
_O200K = PublishedFile("o200k_base", {DEFAULT_EOD_TOKEN: 199_999, "<|endofprompt|>": 200_018})
# Llama 3 has 256 special tokens; tokens whose names differ between its releases are called unnamed.
_LLAMA3_NAMES = {0: "begin_of_text", 1: "end_of_text", 9: "eot_id"}
_LLAMA3_NAMES |= {6: "start_header_id", 7: "end_header_id"}
_LLAMA3 = PublishedFile(
    "llama3",
    {f"<|{_LLAMA3_NAMES.get(i, f'unnamed_{i}')}|>": 128_000 + i for i in range(256)},
)
# Published tiktoken files by SHA-256: r50k_base (GPT-2), p50k_base, cl100k_base, o200k_base and
# Llama 3's tokenizer.model.
PUBLISHED = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": _GPT2,
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": _GPT2,
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": _CL100K,
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": _O200K,
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": _LLAMA3,
}


# Encoders


class JsonEncoder:
    """A tokenizer.json of the ``tokenizers`` library.

    Args:
        path: path of the file, for messages.
        content: bytes of the file.

    Raises:
        UserError: if the file is not a tokenizer.json.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # The library raises no narrower class of exceptions.
            raise _unreadable(path, "tokenizer.json of the tokenizers library", error) from error
        # Ignore the file's truncation and padding, and its dropout, which makes tokens random.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if isinstance(self._tokenizer.model, tokenizers.models.BPE):
            self._tokenizer.model.dropout = None
        self._tokenizer.encode_special_tokens = True
        # Ids may have gaps.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode each text as [num_tokens] uint32; no special tokens are added. Uses all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids to text."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        """Id of the token with this name; None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token(self, number: int) -> str | None:
        """Name of the token with this id; None if there is no such token."""
        found: str | None = self._tokenizer.id_to_token(number)
        return found

    def byte_counts(self) -> dict[int, int]:
        """Id -> bytes of text, for tokens that spell their bytes; empty unless byte-level."""
        if not isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return {}
        # Each character of such a token stands for one byte.
        tokens = self._tokenizer.get_vocab(with_added_tokens=False)
        added = self._tokenizer.get_added_tokens_decoder()
        return {number: len(token) for token, number in tokens.items() if number not in added}

    def special_tokens(self) -> list[str]:
        """Names of the tokens that do not represent text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [token.content for _, token in sorted(added.items()) if token.special]


class SentencePieceEncoder:
    """A SentencePiece .model.

    Args:
        path: path of the file, for messages.
        content: bytes of the file.

    Raises:
        UserError: if the file is not a SentencePiece model.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        try:
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (OSError, RuntimeError) as error:
            raise _unreadable(path, "SentencePiece model", error) from error
        self.vocab_size = len(self._model)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode each text as [num_tokens] uint32; no special tokens are added. Uses all cores."""
        encoded = self._model.encode(list(texts), out_type=int, num_threads=_num_threads())
        return [np.array(ids, dtype=np.uint32) for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids to text."""
        return str(self._model.decode(list(ids)))

    def token_id(self, token: str) -> int | None:
        """Id of the token with this name; None if there is no such token."""
        # For an unknown name, piece_to_id returns the id of the unknown token.
        found = int(self._model.piece_to_id(token))
        return found if self._model.id_to_piece(found) == token else None

    def token(self, number: int) -> str | None:
        """Name of the token with this id; None if there is no such token."""
        return str(self._model.id_to_piece(number)) if 0 <= number < self.vocab_size else None

    def byte_counts(self) -> dict[int, int]:
        """Id -> bytes of text, for tokens that spell their bytes: none of a SentencePiece model."""
        return {}

    def special_tokens(self) -> list[str]:
        """Names of the tokens that do not represent text."""
        ids = range(self.vocab_size)
        return [self._model.id_to_piece(i) for i in ids if self._model.is_control(i)]


class TiktokenEncoder:
    """A tiktoken file with its pattern and its special tokens.

    Args:
        path: path of the file, for messages.
        content: bytes of the file.
        pattern: regular expression that splits text into words.
        special_tokens: name -> id.

    Raises:
        UserError: if the file is not a tiktoken file, the pattern is not a regular expression, or
            the tiktoken package is missing.
    """

    def __init__(
        self, path: Path, content: bytes, pattern: str, special_tokens: Mapping[str, int]
    ) -> None:
        self._ranks = read_ranks(path, content)
        self._special = dict(special_tokens)
        self.vocab_size = 1 + max(*self._ranks.values(), *special_tokens.values())
        try:
            import tiktoken
        except ImportError:
            raise UserError(
                f"{path} is a tiktoken file, which needs the package tiktoken: pip install tiktoken"
            ) from None
        try:
            self._encoding = tiktoken.Encoding(
                path.name,
                pat_str=pattern,
                mergeable_ranks=self._ranks,
                special_tokens=self._special,
            )
        except ValueError as error:
            raise UserError(
                f"--tiktoken-pattern {pattern}: rejected by tiktoken "
                f"({one_line(error)}); use {', '.join(PATTERNS)} or another regular "
                "expression"
            ) from error

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode each text as [num_tokens] uint32; no special tokens are added. Uses all cores."""
        # A single text is encoded in this thread, since starting a thread takes as long as encoding
        # a short text.
        if len(texts) == 1:
            return [self._encode(texts[0])]
        with concurrent.futures.ThreadPoolExecutor(_num_threads()) as pool:
            return list(pool.map(self._encode, texts))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids to text."""
        return str(self._encoding.decode(list(ids)))

    def token_id(self, token: str) -> int | None:
        """Id of the token with this name; None if there is no such token."""
        return self._special.get(token, self._ranks.get(token.encode("utf-8")))

    def token(self, number: int) -> str | None:
        """Name of the special token with this id; None if there is no such token."""
        return next((name for name, found in self._special.items() if found == number), None)

    def byte_counts(self) -> dict[int, int]:
        """Id -> bytes of text, for tokens that spell their bytes: all but special tokens."""
        return {rank: len(token) for token, rank in self._ranks.items()}

    def special_tokens(self) -> list[str]:
        """Names of the tokens that do not represent text."""
        return sorted(self._special, key=lambda token: self._special[token])

    def _encode(self, text: str) -> NDArray[np.uint32]:
        try:
            return np.array(self._encoding.encode_ordinary(text), dtype=np.uint32)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise UserError(
                f"tiktoken fails on a text of {len(text)} characters that begins {text[:40]!r} "
                f"({error}); leave it out, or use a simpler --tiktoken-pattern"
            ) from None


# Special tokens are never recognized in text: '<|endoftext|>' in a document is encoded as plain
# text, so no text can end a document.
Encoder = JsonEncoder | SentencePieceEncoder | TiktokenEncoder


def read_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Read a tiktoken file: byte string -> rank (token id).

    Raises:
        UserError: if a line is not a base64 string with its rank, a byte has no rank, or two byte
            strings share a rank.
    """
    try:
        pairs = (line.split() for line in content.splitlines() if line.strip())
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise _unreadable(path, "tiktoken file", error) from error
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise _unreadable(path, "tiktoken file", f"the byte {missing[0]} has no rank")
    if len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0:
        raise _unreadable(path, "tiktoken file", "two byte strings have the same rank")
    return ranks


def is_panic(error: BaseException) -> bool:
    """Whether ``error`` is a Rust panic: a BaseException whose class cannot be imported."""
    return type(error).__name__ == "PanicException"


def _num_threads() -> int:
    """Number of encoding threads: RAYON_NUM_THREADS, or all cores of this process.

    The Rust libraries follow that variable; worker processes set it.
    """
    requested = os.environ.get("RAYON_NUM_THREADS", "")
    if requested.isdecimal() and int(requested):
        return int(requested)
    return len(os.sched_getaffinity(0))


def _unreadable(path: Path, what: str, error: object) -> UserError:
    hint = "create one with megatron-chameleon train_tokenizer"
    return UserError(f"{path} is not a {what} ({one_line(error)}); {hint}")


# Files


@dataclasses.dataclass(frozen=True)
class TokenizerFile:
    """Everything that determines the ids of a text.

    Attributes:
        path: path of the file that was read.
        kind: library that reads the file.
        content: bytes of the file that a corpus keeps; they differ from those of ``path`` if
            several files were combined.
        pattern: regular expression that splits text into words, if the file does not contain it.
        special_tokens: name -> id, if the file does not contain them.
    """

    path: Path
    kind: TokenizerKind
    content: bytes = dataclasses.field(repr=False)
    pattern: str | None = None
    special_tokens: Mapping[str, int] | None = None

    @property
    def name(self) -> str:
        """Name of the file in a corpus."""
        return FILE_NAMES[self.kind]

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of everything that determines the ids."""
        return tokenizer_hash(self.content, self.pattern, self.special_tokens)

    def open(self) -> Encoder:
        """Open the file in its library. Raises UserError if the library cannot read it."""
        if self.kind == "tokenizers":
            return JsonEncoder(self.path, self.content)
        if self.kind == "sentencepiece":
            return SentencePieceEncoder(self.path, self.content)
        assert self.pattern is not None
        return TiktokenEncoder(self.path, self.content, self.pattern, self.special_tokens or {})


def recorded_tokenizer_file(path: Path, identity: TokenizerIdentity) -> TokenizerFile:
    """Read the tokenizer at ``path``, with the pattern and special tokens recorded in a corpus.

    Raises:
        UserError: if there is no tokenizer.
    """
    if not path.exists():
        raise UserError(
            f"the corpus's tokenizer {path} is missing; restore this file, or preprocess the text "
            "again"
        )
    return dataclasses.replace(
        _read(path), pattern=identity.pattern, special_tokens=identity.special_tokens
    )


def same_ids(tokenizer: TokenizerIdentity, path: Path, folder: Path) -> bool | None:
    """Return whether every token of a corpus has the same id in the tokenizer in ``folder``.

    Files of a tokenizer.json with the same vocabulary may differ in format and added tokens, so
    their ids are compared token by token. Other files must be identical.

    Args:
        tokenizer: tokenizer of the corpus.
        path: its file; if it is missing, only hashes are compared.
        folder: folder of a Hugging Face model, which may hold the same tokenizer in two formats.

    Returns:
        None if the folder has no tokenizer.

    Raises:
        UserError: if a file is damaged, or there are several tokenizers and no tokenizer.json.
    """
    copy = folder / tokenizer.file
    found = copy if copy.is_file() else tokenizer_file_in(folder)
    if found is None:
        return None
    model = recorded_tokenizer_file(found, tokenizer)
    if model.sha256 == tokenizer.sha256:
        return True
    if not path.exists():
        return False
    own = recorded_tokenizer_file(path, tokenizer)
    if own.content == model.content:
        return True
    return own.kind == model.kind == "tokenizers" and _ids(own).items() <= _ids(model).items()


def _ids(file: TokenizerFile) -> dict[str, int]:
    """Token -> id of a tokenizer.json, added tokens included."""
    file.open()  # raises UserError for a damaged file
    return tokenizers.Tokenizer.from_buffer(file.content).get_vocab()


def read_tokenizer_file(
    path: Path, eod_token: str | None = None, tiktoken_pattern: str | None = None
) -> TokenizerFile:
    """Read everything that determines the ids of the tokenizer at ``path``.

    Args:
        path: a tokenizer.json, a vocab.json with its merges.txt, a tiktoken file, a SentencePiece
            .model, or a folder that holds one of them.
        eod_token: name of the end-of-document token; default: the end-of-text token of the Hugging
            Face model in the same folder, or else ``DEFAULT_EOD_TOKEN``. In an unknown tiktoken
            file it is the only special token, and its id is the next free one; other files need not
            have it.
        tiktoken_pattern: see EncoderOptions; must be None unless the file is a tiktoken file.

    Raises:
        UserError: if there is no tokenizer, it cannot be read, or its pattern is unknown.
    """
    file = _read(path)
    if file.kind == "tiktoken":
        known = PUBLISHED.get(hashlib.sha256(file.content).hexdigest())
        name = tiktoken_pattern or (known.pattern if known else None)
        if name is None:
            raise UserError(
                f"{file.path} has no pattern that splits text into words: pass "
                f"--tiktoken-pattern {', '.join(PATTERNS)} or a regular expression"
            )
        if known:
            special = dict(known.special_tokens)
        else:
            end = eod_token or _configured_eod_token(file.path.parent) or DEFAULT_EOD_TOKEN
            special = {end: 1 + max(read_ranks(file.path, file.content).values())}
        pattern = PATTERNS.get(name, name)
        file = dataclasses.replace(file, pattern=pattern, special_tokens=special)
    elif tiktoken_pattern is not None:
        raise UserError(
            f"--tiktoken-pattern has no effect: {file.path} is not a tiktoken file; leave it out"
        )
    return file


def _read(path: Path) -> TokenizerFile:
    """Read the tokenizer at ``path``, a file or folder, without pattern and special tokens."""
    file = path
    if path.is_dir():
        found = tokenizer_file_in(path)
        if found is None:
            raise UserError(
                f"{path} holds no tokenizer: none of {', '.join(_IN_A_FOLDER)}, and no vocab.json "
                "with its merges.txt; name a file"
            )
        file = found
    if not file.is_file():
        raise UserError(
            f"{path} does not exist; create a tokenizer with megatron-chameleon train_tokenizer"
        )
    if file.name.endswith(tuple(_GPT2_NAMES)):
        return TokenizerFile(file, "tokenizers", tokenizer_json_of(file))
    content = file.read_bytes()
    if file.suffix == ".json":
        return TokenizerFile(file, "tokenizers", content)
    # Llama 3's tiktoken file is called tokenizer.model.
    if file.suffix == ".tiktoken" or _TIKTOKEN_LINE.match(content):
        return TokenizerFile(file, "tiktoken", content)
    if file.suffix == ".model":
        return TokenizerFile(file, "sentencepiece", content)
    raise UserError(
        f"{file}: a tokenizer must be a tokenizer.json, a vocab.json with its merges.txt, a "
        "tiktoken file or a SentencePiece .model; create one with megatron-chameleon "
        "train_tokenizer"
    )


def tokenizer_file_in(folder: Path) -> Path | None:
    """Return the tokenizer file in ``folder``; None if there is none.

    A tokenizer.json is preferred, since it is made from the other files of a folder.

    Raises:
        UserError: if there are several tokenizers and no tokenizer.json.
    """
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    inside = [found for name in _IN_A_FOLDER for found in sorted(folder.glob(name))]
    if len(inside) > 1:
        names = ", ".join(found.name for found in inside)
        raise UserError(f"{folder} holds more than one tokenizer ({names}); name one file")
    return inside[0] if inside else _vocab_file_in(folder)


# GPT-2's vocab.json and merges.txt


def _vocab_file_in(folder: Path) -> Path | None:
    """The vocabulary file in ``folder``; None unless both this file and its merges exist."""
    for vocab, merges in _GPT2_NAMES.items():
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab
    return None


def tokenizer_json_of(vocab_file: Path) -> bytes:
    """Return a tokenizer.json that encodes like GPT-2's ``vocab_file`` and the merges next to it.

    Words are split as in GPT-2. Entries that no merge produces are the special tokens. The same
    files give the same bytes.

    Raises:
        UserError: if the merges are missing, or the files do not make a byte-level BPE.
    """
    ending = next(name for name in _GPT2_NAMES if vocab_file.name.endswith(name))
    merges_file = Path(f"{vocab_file}".removesuffix(ending) + _GPT2_NAMES[ending])
    if not merges_file.is_file():
        raise UserError(f"{merges_file} is missing; {vocab_file} needs its merges")
    try:
        vocab: dict[str, int] = json.loads(vocab_file.read_bytes())
        lines = merges_file.read_text(encoding="utf-8").split("\n")
        # transformers skips blank lines, which the library rejects.
        merges: list[Any] = [
            tuple(line.split())
            for line in lines
            if line.strip() and not line.startswith("#version")
        ]
        BPE(vocab, merges)
        if missing := sorted(set(ByteLevel.alphabet()) - vocab.keys()):
            raise ValueError(f"there is no entry for {len(missing)} of the 256 bytes")
    except Exception as error:  # The library raises no narrower class of exceptions.
        raise UserError(
            f"{vocab_file} and {merges_file.name} are not files of a byte-level BPE like GPT-2's "
            f"({one_line(error)})"
        ) from error
    made = {left + right for left, right in merges}.union(ByteLevel.alphabet())
    ordered = sorted(vocab.items(), key=lambda entry: entry[1])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = [
        {"id": number, "content": token, **flags, "special": True}
        for token, number in ordered
        if token not in made
    ]
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    by_bytes |= {"use_regex": True}
    unused = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    model = {"type": "BPE", **dict.fromkeys(unused), "fuse_unk": False, "byte_fallback": False}
    model |= {"vocab": dict(ordered), "merges": [" ".join(merge) for merge in merges]}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
    }
    content |= {"normalizer": None, "pre_tokenizer": by_bytes, "post_processor": None}
    content |= {"decoder": by_bytes, "model": model}
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer: encode and decode text.

    Attributes:
        file: tokenizer file.
        encoder: encoder of the tokenizer's own library.
        eod_id: id of the end-of-document token.
        fast_encoder: faster encoder with the same ids, if any.
    """

    file: TokenizerFile
    encoder: Encoder
    eod_id: int
    fast_encoder: GigatokenEncoder | None = None

    @property
    def path(self) -> Path:
        """The file that was read."""
        return self.file.path

    @functools.cached_property
    def sha256(self) -> str:
        """Hex SHA-256 of everything that determines the ids."""
        return self.file.sha256

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return self.encoder.vocab_size

    @property
    def eod_token(self) -> str:
        """Name of the end-of-document token."""
        name = self.encoder.token(self.eod_id)
        assert name is not None
        return name

    @property
    def token_type(self) -> TokenType:
        """Integer type of a token on disk."""
        return token_type(self.vocab_size)

    @property
    def identity(self) -> TokenizerIdentity:
        """The tokenizer's record in corpus.json; ``file`` is the name of the corpus's copy."""
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

        A text of more than ``LONGEST_PART`` characters is encoded in :func:`parts`.

        Returns:
            tokens [num_tokens], the concatenated tokens of all texts, of type :attr:`token_type`;
            and lengths [num_texts] int32, the number of tokens of each text.

        Raises:
            UserError: if the library cannot encode a text.
        """
        if max(map(len, texts), default=0) <= LONGEST_PART:
            tokens, lengths = self._encode(texts)
        else:
            encoded: list[_Encoded] = []
            for is_long, some in itertools.groupby(texts, lambda text: len(text) > LONGEST_PART):
                if is_long:
                    encoded += map(self._encode_in_parts, some)
                else:
                    encoded.append(self._encode(list(some)))
            tokens, lengths = _joined(encoded)
        longest = lengths.max(initial=0)
        if longest > _MOST_TOKENS:
            raise UserError(
                f"a document has {longest} tokens, more than the {_MOST_TOKENS} that the "
                ".idx format allows; divide it"
            )
        return tokens, lengths.astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids to text."""
        return self.encoder.decode(ids)

    def save(self, folder: Path) -> None:
        """Write the file that a corpus keeps into ``folder``, under the name in ``identity``."""
        with replacing(folder / self.file.name) as temporary:
            temporary.write_bytes(self.file.content)

    def _encode(self, texts: Sequence[str]) -> _Encoded:
        if self.fast_encoder is not None:
            tokens, lengths = self.fast_encoder.encode_documents(texts)
            return tokens.astype(self.token_type), lengths
        encoded = self.encoder.encode_batch(texts)
        end = np.array([self.eod_id], dtype=np.uint32)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) + 1
        ended = [end[:0], *itertools.chain.from_iterable((ids, end) for ids in encoded)]
        # Concatenate and convert to the type on disk in one copy.
        return np.concatenate(ended, dtype=self.token_type, casting="unsafe"), lengths

    def _encode_in_parts(self, text: str) -> _Encoded:
        """Encode the parts of a long text without end-of-document tokens between them."""
        some = list(parts(text, self._drops_space))
        steps = range(0, len(some), _PARTS_AT_ONCE)
        tokens, lengths = _joined([self._encode(some[i : i + _PARTS_AT_ONCE]) for i in steps])
        tokens = np.delete(tokens, np.cumsum(lengths)[:-1] - 1)
        return tokens, np.array([tokens.size])

    @functools.cached_property
    def _drops_space(self) -> bool:
        """Whether a space is put before every text, so 'a b' is encoded like 'a' and 'b'."""
        whole, first, second = self.encoder.encode_batch(["a b", "a", "b"])
        return np.array_equal(whole, np.concatenate([first, second]))


def parts(text: str, drop_space: bool, longest: int = LONGEST_PART) -> Iterator[str]:
    """Divide a text into parts whose concatenated tokens are those of the text.

    Each part ends before a word or a line, within the last 4096 of ``longest`` characters. If there
    is no such place (millions of spaces, or a text without spaces), the part has ``longest``
    characters, and a token or two may differ from those of the whole text.

    Args:
        text: text to divide.
        drop_space: whether the space between two words is dropped at a boundary, because the
            tokenizer puts one before every text.
        longest: maximum number of characters per part.
    """
    start = 0
    while len(text) - start > longest:
        cut = end = start + longest
        dropped = 0
        for pattern in _PLACES:
            places = [
                place.start()
                for place in pattern.finditer(text, max(start + 1, end - _WINDOW), end)
            ]
            if places:
                cut, dropped = places[-1], int(drop_space and pattern is _BETWEEN_WORDS)
                break
        yield text[start:cut]
        start = cut + dropped
    yield text[start:]


def _joined(encoded: Sequence[_Encoded]) -> _Encoded:
    tokens, lengths = zip(*encoded, strict=True)
    return np.concatenate(tokens), np.concatenate(lengths)


def load_tokenizer(
    path: Path, eod_token: str | None = None, tiktoken_pattern: str | None = None
) -> Tokenizer:
    """Load the tokenizer at ``path``.

    The arguments are those of :func:`read_tokenizer_file`.

    Raises:
        UserError: as :func:`read_tokenizer_file`, or if there is no token ``eod_token``.
    """
    file = read_tokenizer_file(path, eod_token, tiktoken_pattern)
    encoder, folder = file.open(), file.path.parent
    eod_token = eod_token or _configured_eod_token(folder) or _configured_eod_id(folder, encoder)
    eod_token = eod_token or DEFAULT_EOD_TOKEN
    eod_id = encoder.token_id(eod_token)
    if eod_id is None:
        candidates = encoder.special_tokens()[:_CANDIDATES_SHOWN]
        raise UserError(
            f"{file.path} has no token '{eod_token}' to end documents with; its special tokens are "
            f"{', '.join(candidates) or '(none)'}: name one with --eod-token"
        )
    if eod_id in encoder.encode_batch([eod_token])[0]:
        warnings.warn(
            f"'{eod_token}' is not a special token of {file.path}: if a text contains it, the "
            "document ends at this place",
            stacklevel=2,
        )
    return Tokenizer(file, encoder, eod_id)


def _configured_eod_token(folder: Path) -> str | None:
    """Return the end-of-text token that the tokenizer_config.json of a Hugging Face model names."""
    token = _configured(folder / "tokenizer_config.json").get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def _configured_eod_id(folder: Path, encoder: Encoder) -> str | None:
    """Return the special token whose id the config.json of a Hugging Face model names."""
    ids = _configured(folder / "config.json").get("eos_token_id")
    first = ids[0] if isinstance(ids, list) and ids else ids
    name = encoder.token(first) if isinstance(first, int) and first >= 0 else None
    # The default of transformers is the id of an ordinary token in many tokenizers.
    return name if name in encoder.special_tokens() else None


def _configured(path: Path) -> dict[str, Any]:
    return read_foreign_json(path, "download it again, or remove it") if path.is_file() else {}


def corpus_tokenizer(corpus: Corpus, path: Path | None = None) -> Tokenizer:
    """Load the tokenizer of ``corpus``: the copy in the corpus, or an identical one at ``path``.

    Raises:
        UserError: if the file is missing, or is not the tokenizer that made the tokens.
    """
    own = corpus.root / corpus.tokenizer.file
    file = recorded_tokenizer_file(own if path is None else path, corpus.tokenizer)
    if file.sha256 != corpus.tokenizer.sha256:
        raise UserError(
            f"{file.path} is not the tokenizer that made the corpus {corpus.root} (its hash "
            f"differs); use the original {own}, or preprocess again"
        )
    return Tokenizer(file, file.open(), corpus.tokenizer.eod_id)
