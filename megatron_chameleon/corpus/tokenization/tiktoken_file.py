"""A tiktoken file: byte strings and their ranks, and what has to be known besides.

The file does not say how text is split into words nor which special tokens there are. Both are
known for the files that are published; for another one the pattern has to be named.
"""

from __future__ import annotations

import base64
import binascii
import concurrent.futures
import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.corpus.tokenization.encoders import (
    TokenizerKind,
    is_panic,
    num_threads,
    unreadable,
)
from megatron_chameleon.errors import UserError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
# How words are told apart, by the name of the encoding that is known for it.
PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        "cl100k_base": _WORDS + r"|\s+$" + _SPACE,
        "o200k_base": (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
            rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACE
        ),
        # As cl100k_base but for white space at the very end.
        "llama3": _WORDS + _SPACE,
    }
)
_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?(?:\n|\Z)")
_EOD = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class PublishedFile:
    """A file that is published: the name of its pattern, its special tokens, and its ranks."""

    pattern: str
    special_tokens: Mapping[str, int]
    ranks: int


def _llama3_special_tokens() -> dict[str, int]:
    """The 256 of Llama 3; only those whose names are the same in all of its releases have one."""
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id"}
    named[9] = "eot_id"
    return {f"<|{named.get(i, f'unnamed_{i}')}|>": 128_000 + i for i in range(256)}


# By the SHA-256 of the file.
PUBLISHED: Mapping[str, PublishedFile] = MappingProxyType(
    {
        # r50k_base, which is GPT-2's
        "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": PublishedFile(
            "gpt2", {_EOD: 50_256}, 50_256
        ),
        # p50k_base
        "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": PublishedFile(
            "gpt2", {_EOD: 50_256}, 50_280
        ),
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": PublishedFile(
            "cl100k_base",
            {
                _EOD: 100_257,
                "<|fim_prefix|>": 100_258,
                "<|fim_middle|>": 100_259,
                "<|fim_suffix|>": 100_260,
                "<|endofprompt|>": 100_276,
            },
            100_256,
        ),
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": PublishedFile(
            "o200k_base", {_EOD: 199_999, "<|endofprompt|>": 200_018}, 199_998
        ),
        # Llama 3's tokenizer.model
        "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": PublishedFile(
            "llama3", _llama3_special_tokens(), 128_000
        ),
    }
)


class TiktokenEncoder:
    """A tiktoken file with its pattern and its special tokens.

    Args:
        path: where it is from, for messages.
        content: of the file.
        pattern: a regular expression.
        special_tokens: name -> id.

    Raises:
        UserError: if the file is no such file, the pattern is no regular expression, or the
            tiktoken package is missing.
    """

    kind: TokenizerKind = "tiktoken"

    def __init__(
        self, path: Path, content: bytes, pattern: str, special_tokens: Mapping[str, int]
    ) -> None:
        ranks = read_ranks(path, content)
        self._encoding = _encoding(path, ranks, pattern, special_tokens)
        self._special = dict(special_tokens)
        self._ranks = ranks
        self.vocab_size = 1 + max(*ranks.values(), *special_tokens.values())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token ids of each text, [num_tokens] uint32, and nothing added. Uses all cores."""
        if len(texts) == 1:
            return [self._encode(texts[0])]
        with concurrent.futures.ThreadPoolExecutor(num_threads()) as pool:
            return list(pool.map(self._encode, texts))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._encoding.decode(list(ids)))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, None if there is no such token."""
        return self._special.get(token, self._ranks.get(token.encode("utf-8")))

    def special_tokens(self) -> list[str]:
        """The tokens that stand for no text, by name."""
        return sorted(self._special, key=lambda token: self._special[token])

    def _encode(self, text: str) -> NDArray[np.uint32]:
        try:
            return np.array(self._encoding.encode_ordinary(text), dtype=np.uint32)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise UserError(
                f"tiktoken gives up on a text of {len(text)} characters that begins "
                f"{text[:40]!r} ({error}); leave it out, or give a plainer --tiktoken-pattern"
            ) from None


def is_tiktoken(content: bytes) -> bool:
    """Whether a file that may be of another kind begins as a tiktoken file does."""
    return _LINE.match(content) is not None


def read_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Byte string -> rank, which is its id.

    Raises:
        UserError: naming the first line that is not one of such a file; or if a byte has no rank,
            or two byte strings have the same.
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
        raise unreadable(path, "tiktoken file", f"the byte {missing[0]} has no rank")
    if len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0:
        raise unreadable(path, "tiktoken file", "two byte strings have the same rank")
    return ranks


def pattern_and_special_tokens(
    path: Path,
    content: bytes,
    wanted: str | None,
    eod_token: str,
    published: Mapping[str, PublishedFile] = PUBLISHED,
) -> tuple[str, dict[str, int]]:
    """How the file at ``path`` splits text, as a regular expression, and its special tokens.

    Args:
        path: where it is from, for messages.
        content: of the file.
        wanted: one of PATTERNS, a regular expression, or None for what is known of the file.
        eod_token: the one special token of a file that is not known; its id is the next free one.
        published: what is known, by SHA-256.

    Raises:
        UserError: if the pattern is not known and not named.
    """
    known = published.get(hashlib.sha256(content).hexdigest())
    if known is not None:
        return _pattern(wanted or known.pattern), dict(known.special_tokens)
    ranks = read_ranks(path, content)
    if wanted is None:
        alike = [file.pattern for file in published.values() if file.ranks == len(ranks)]
        raise UserError(
            f"{path} does not say how text is split into words: pass --tiktoken-pattern "
            f"{', '.join(PATTERNS)} or a regular expression; it holds {len(ranks)} ranks"
            + (f", as many as the file of {alike[0]}" if alike else "")
        )
    return _pattern(wanted), {eod_token: 1 + max(ranks.values())}


def _pattern(wanted: str) -> str:
    return PATTERNS.get(wanted, wanted)


def _encoding(
    path: Path, ranks: dict[bytes, int], pattern: str, special_tokens: Mapping[str, int]
) -> Any:
    try:
        import tiktoken
    except ImportError:
        raise UserError(
            f"{path} is a tiktoken file and the tiktoken package is missing: pip install tiktoken"
        ) from None
    try:
        return tiktoken.Encoding(
            path.name,
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens=dict(special_tokens),
        )
    except ValueError as error:
        raise UserError(
            f"--tiktoken-pattern {pattern}: tiktoken cannot use it ({' '.join(str(error).split())})"
            f"; give {', '.join(PATTERNS)} or another regular expression"
        ) from error
