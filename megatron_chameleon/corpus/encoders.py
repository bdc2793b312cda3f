"""Encoders over tokenizers, SentencePiece and tiktoken.

A tiktoken file contains neither the pattern that splits text into words nor the special tokens.
Both are built in for the published files; other files need ``--tiktoken-pattern``.
"""

from __future__ import annotations

import base64
import binascii
import concurrent.futures
import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import sentencepiece
import tokenizers
from numpy.typing import NDArray

from megatron_chameleon.errors import UserError

TokenizerKind = Literal["tokenizers", "sentencepiece", "tiktoken"]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
# Pre-tokenization regular expressions by encoding name.
PATTERNS: Mapping[str, str] = MappingProxyType(
    {
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
)
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?(?:\n|\Z)")
_EOD = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class PublishedFile:
    """A published tiktoken file: the name of its pattern, its special tokens and its ranks."""

    pattern: str
    special_tokens: Mapping[str, int]
    ranks: int


def _llama3_special_tokens() -> dict[str, int]:
    """Llama 3's 256 tokens; those whose names differ between its releases are unnamed."""
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id"}
    named[9] = "eot_id"
    return {f"<|{named.get(i, f'unnamed_{i}')}|>": 128_000 + i for i in range(256)}


_CL100K_SPECIAL_TOKENS = {
    _EOD: 100_257,
    "<|fim_prefix|>": 100_258,
    "<|fim_middle|>": 100_259,
    "<|fim_suffix|>": 100_260,
    "<|endofprompt|>": 100_276,
}
_O200K_SPECIAL_TOKENS = {_EOD: 199_999, "<|endofprompt|>": 200_018}
# By the SHA-256 of the file: r50k_base (GPT-2), p50k_base, cl100k_base, o200k_base, Llama 3's
# tokenizer.model.
PUBLISHED: Mapping[str, PublishedFile] = MappingProxyType(
    {
        "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": PublishedFile(
            "gpt2", {_EOD: 50_256}, 50_256
        ),
        "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": PublishedFile(
            "gpt2", {_EOD: 50_256}, 50_280
        ),
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": PublishedFile(
            "cl100k_base", _CL100K_SPECIAL_TOKENS, 100_256
        ),
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": PublishedFile(
            "o200k_base", _O200K_SPECIAL_TOKENS, 199_998
        ),
        "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": PublishedFile(
            "llama3", _llama3_special_tokens(), 128_000
        ),
    }
)


class JsonEncoder:
    """A tokenizer.json of the ``tokenizers`` library.

    Args:
        path: of the file, for messages.
        content: of the file.

    Raises:
        UserError: if the file is not a tokenizer.json.
    """

    kind: TokenizerKind = "tokenizers"

    def __init__(self, path: Path, content: bytes) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing narrower
            raise _unreadable(path, "tokenizer.json of the tokenizers library", error) from error
        # Ignore the file's truncation and padding.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        # Ids may have gaps.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token ids of each text, [num_tokens] uint32, with nothing added. Uses all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        """The id of the token with this name; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def special_tokens(self) -> list[str]:
        """Names of the tokens that do not represent text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [token.content for _, token in sorted(added.items()) if token.special]


class SentencePieceEncoder:
    """A SentencePiece .model.

    Args:
        path: of the file, for messages.
        content: of the file.

    Raises:
        UserError: if the file is not a SentencePiece model.
    """

    kind: TokenizerKind = "sentencepiece"

    def __init__(self, path: Path, content: bytes) -> None:
        try:
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (OSError, RuntimeError) as error:
            raise _unreadable(path, "SentencePiece model", error) from error
        self.vocab_size = len(self._model)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token ids of each text, [num_tokens] uint32, with nothing added. Uses all cores."""
        encoded = self._model.encode(list(texts), out_type=int, num_threads=_num_threads())
        return [np.array(ids, dtype=np.uint32) for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._model.decode(list(ids)))

    def token_id(self, token: str) -> int | None:
        """The id of the token with this name; None if there is none."""
        found = int(self._model.piece_to_id(token))  # the unknown token's if there is none
        return found if self._model.id_to_piece(found) == token else None

    def special_tokens(self) -> list[str]:
        """Names of the tokens that do not represent text."""
        ids = range(self.vocab_size)
        return [self._model.id_to_piece(i) for i in ids if self._model.is_control(i)]


class TiktokenEncoder:
    """A tiktoken file with its pattern and its special tokens.

    Args:
        path: of the file, for messages.
        content: of the file.
        pattern: a regular expression.
        special_tokens: name -> id.

    Raises:
        UserError: if the file is not a tiktoken file, the pattern is not a regular expression, or
            the tiktoken package is missing.
    """

    kind: TokenizerKind = "tiktoken"

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
                f"({' '.join(str(error).split())}); use {', '.join(PATTERNS)} or another regular "
                "expression"
            ) from error

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token ids of each text, [num_tokens] uint32, with nothing added. Uses all cores."""
        if len(texts) == 1:
            return [self._encode(texts[0])]
        with concurrent.futures.ThreadPoolExecutor(_num_threads()) as pool:
            return list(pool.map(self._encode, texts))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._encoding.decode(list(ids)))

    def token_id(self, token: str) -> int | None:
        """The id of the token with this name; None if there is none."""
        return self._special.get(token, self._ranks.get(token.encode("utf-8")))

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


def is_tiktoken(content: bytes) -> bool:
    """Whether ``content`` starts like a tiktoken file."""
    return _TIKTOKEN_LINE.match(content) is not None


def read_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Read a tiktoken file: byte string -> rank (token id).

    Raises:
        UserError: naming the first invalid line; or if a byte has no rank, or two byte strings
            share one.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            if line.strip():
                raise UserError(
                    f"{path}:{number} is not a base64 string and its rank, as in a tiktoken file"
                ) from None
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise _unreadable(path, "tiktoken file", f"the byte {missing[0]} has no rank")
    if len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0:
        raise _unreadable(path, "tiktoken file", "two byte strings have the same rank")
    return ranks


def pattern_and_special_tokens(
    path: Path,
    content: bytes,
    wanted: str | None,
    eod_token: str,
    published: Mapping[str, PublishedFile] = PUBLISHED,
) -> tuple[str, dict[str, int]]:
    """Pre-tokenization regular expression and special tokens of a tiktoken file.

    Args:
        path: of the file, for messages.
        content: of the file.
        wanted: one of PATTERNS, a regular expression, or None for that of a published file.
        eod_token: the only special token of an unknown file; its id is the next free one.
        published: the known files, by SHA-256.

    Raises:
        UserError: if the pattern is unknown and was not passed.
    """
    known = published.get(hashlib.sha256(content).hexdigest())
    if known is not None:
        name = wanted or known.pattern
        return PATTERNS.get(name, name), dict(known.special_tokens)
    ranks = read_ranks(path, content)
    if wanted is None:
        alike = [file.pattern for file in published.values() if file.ranks == len(ranks)]
        raise UserError(
            f"{path} has no pattern to split text into words with: pass --tiktoken-pattern "
            f"{', '.join(PATTERNS)} or a regular expression; it holds {len(ranks)} ranks"
            + (f", as many as the file of {alike[0]}" if alike else "")
        )
    return PATTERNS.get(wanted, wanted), {eod_token: 1 + max(ranks.values())}


def is_panic(error: BaseException) -> bool:
    """Whether ``error`` is a Rust panic, which is neither an Exception nor importable."""
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
    reason = " ".join(str(error).split())
    return UserError(f"{path} is not a {what} ({reason}); tools/train_tokenizer.py makes one")
