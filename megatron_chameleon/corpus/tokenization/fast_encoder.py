"""The gigatoken package in the place of a tokenizer's own library, where it gives the same ids.

On one core it is some fifty times faster than the ``tokenizers`` library. What could make it
differ is looked at before and all along: a sample of the text and awkward strings are compared
before it is used, a document now and then while it is, and texts with characters that only some
releases of Unicode know (which is where it is known to differ) are left to the own library.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import psutil
from numpy.typing import NDArray

from megatron_chameleon.corpus.options import EncoderChoice
from megatron_chameleon.corpus.tokenization.awkward_texts import awkward_texts
from megatron_chameleon.corpus.tokenization.encoders import Encoder, is_panic
from megatron_chameleon.corpus.tokenization.file import TokenizerFile
from megatron_chameleon.corpus.tokenization.settled import SettledCharacters
from megatron_chameleon.corpus.tokenization.tiktoken_file import PATTERNS
from megatron_chameleon.corpus.tokenization.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError

Encode = Callable[[bytes], NDArray[np.uint32]]

_SAMPLE_CHARACTERS = 1 << 20
# The sample is the beginnings and middles of texts, so that it is of many.
_SAMPLE_PIECE = 1 << 13
# One text in so many characters is encoded by both libraries, or a piece from its middle: about
# 1% of the time that gigatoken takes for the rest.
_COMPARE_EVERY = 1 << 22
_COMPARE_CHARACTERS = 512
# It remembers every word that it has met. Where the process has grown by so much, looked at after
# so many characters, it is loaded anew.
_MAX_GROWTH_BYTES = 200_000_000
_LOOK_EVERY = 1 << 24

# What ends a document for gigatoken. No part of it at its beginning is one at its end, so that no
# text can be taken for a piece of it; a text that holds all of it is left to the own library.
_END = "\x1f\x00end of document\x00"
_END_BYTES = _END.encode()

# gigatoken's names for how a tiktoken file splits text.
_SCHEMES = MappingProxyType(
    {
        PATTERNS["gpt2"]: "gpt2",
        PATTERNS["cl100k_base"]: "gpt4",
        PATTERNS["o200k_base"]: "o200k",
        PATTERNS["llama3"]: "olmo3",
    }
)


class CannotEncodeError(Exception):
    """Why gigatoken cannot be used with a tokenizer, in a few words."""


class GigatokenEncoder:
    """Encodes as ``own`` does, with gigatoken.

    Args:
        file: the tokenizer's.
        own: the same file in its own library.
        eod_id: id of the end-of-document token.

    Raises:
        CannotEncodeError: if the package is missing or does not take the tokenizer.
    """

    def __init__(self, file: TokenizerFile, own: Encoder, eod_id: int) -> None:
        self._file = file
        self._own = own
        self._eod_id = eod_id
        self._settled = SettledCharacters()
        self._process = psutil.Process()
        self._since_comparison = 0
        self._since_look = 0
        self._load()

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]] | None:
        """Encode texts in one call, on one core.

        Returns:
            tokens [num_tokens] uint32 of all texts, each with its end-of-document token, and
            lengths [num_texts] int64; or None if there is a text among them that cannot be encoded
            so: then they have to be given to :meth:`encode_batch`.

        Raises:
            UserError: if the own library gives other ids for a text that was compared.
        """
        if not all(map(self._settled.all_in, texts)):
            return None
        tokens = self._encode(texts)
        ends = np.flatnonzero(tokens == self._eod_id)
        if ends.size != len(texts):
            return None
        self._look_after(texts)
        return tokens, np.diff(ends, prepend=-1)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token ids of each text, [num_tokens] uint32, and nothing added.

        Raises:
            UserError: if the own library gives other ids for a text that was compared.
        """
        encoded = [
            self._encode([text])[:-1] if self._takes(text) else self._own.encode_batch([text])[0]
            for text in texts
        ]
        self._look_after(texts)
        return encoded

    def first_difference(
        self, texts: Sequence[str], by_own: Callable[[], Sequence[NDArray[np.uint32]]]
    ) -> str | None:
        """The first of ``texts`` that ``by_own`` has other ids for, None if there is none.

        That is called last, so that it may be at work in another thread meanwhile.
        """
        taken = [number for number, text in enumerate(texts) if self._takes(text)]
        tokens = self._encode([texts[number] for number in taken])
        expected = by_own()
        start = 0
        for number in taken:
            end = start + expected[number].size
            if not (
                np.array_equal(tokens[start:end], expected[number])
                and np.array_equal(tokens[end : end + 1], [self._eod_id])
            ):
                return texts[number]
            start = end + 1
        return None

    def _takes(self, text: str) -> bool:
        return self._settled.all_in(text) and _END not in text

    def _encode(self, texts: Sequence[str]) -> NDArray[np.uint32]:
        """Token ids of all texts, with the end-of-document token after each."""
        try:
            return self._gigatoken(_END_BYTES.join([*map(str.encode, texts), b""]))
        except BaseException as error:
            if not is_panic(error):
                raise
            longest = max(texts, key=len)
            raise UserError(
                f"gigatoken gives up on texts of up to {len(longest)} characters, one of which "
                f"begins {longest[:40]!r} ({error}); run again with --encoder own"
            ) from None

    def _look_after(self, texts: Sequence[str]) -> None:
        """Compare a text, and give memory back, if it is time to."""
        num_characters = sum(map(len, texts))
        self._since_comparison += num_characters
        if self._since_comparison >= _COMPARE_EVERY:
            self._since_comparison = 0
            self._compare(max(texts, key=len))
        self._since_look += num_characters
        if self._since_look >= _LOOK_EVERY:
            self._since_look = 0
            if self._process.memory_info().rss - self._loaded_bytes > _MAX_GROWTH_BYTES:
                del self._gigatoken  # its memory is given back before the next one asks for some
                self._load()

    def _compare(self, text: str) -> None:
        start = max(0, (len(text) - _COMPARE_CHARACTERS) // 2)
        texts = [text[start : start + _COMPARE_CHARACTERS]]
        differing = self.first_difference(texts, lambda: self._own.encode_batch(texts))
        if differing is not None:
            raise UserError(
                f"gigatoken and {self._own.kind} encode {differing[:40]!r}... otherwise: remove "
                "the unfinished --output and run again with --encoder own"
            )

    def _load(self) -> None:
        self._gigatoken = gigatoken_for(self._file, self._eod_id)
        self._loaded_bytes = self._process.memory_info().rss


def gigatoken_for(file: TokenizerFile, eod_id: int) -> Encode:
    """Gigatoken's function from UTF-8 to token ids, for the tokenizer ``file``.

    It is made without the special tokens of the file, which gigatoken would read out of the text;
    the only one is a string that ends documents, so that many can be encoded in one call.

    Raises:
        CannotEncodeError: if the package is missing or does not take the tokenizer.
    """
    try:
        import gigatoken
    except ImportError:
        raise CannotEncodeError("the gigatoken package is not installed") from None
    try:
        tokenizer = _gigatoken(gigatoken, file, eod_id)
    except CannotEncodeError:
        raise
    except BaseException as error:  # it raises whatever its parts raise
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        reason = " ".join(str(error).split())
        raise CannotEncodeError(f"gigatoken does not take {file.path} ({reason})") from error

    def encode(text: bytes) -> NDArray[np.uint32]:
        # Of a batch, since that lets other threads run; padded, since that is numpy's; of a
        # BytesSource, since to tell a list from an awkward array it imports awkward and pyarrow.
        source = gigatoken.BytesSource(text)
        rows, _ = tokenizer.encode_batch_padded(source, pad_id=0, parallel=False)
        tokens: NDArray[np.uint32] = rows[0]
        return tokens

    return encode


def _gigatoken(gigatoken: Any, file: TokenizerFile, eod_id: int) -> Any:
    if file.kind == "tokenizers":
        return gigatoken.Tokenizer.from_json(_with_one_special_token(file.content, eod_id))
    if file.kind == "sentencepiece":
        # The class would put the special tokens in; this is what it is made from.
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        content = sentencepiece_to_tokenizer_json(file.content)
        return gigatoken.Tokenizer.from_json(_with_one_special_token(content, eod_id))
    scheme = _SCHEMES.get(file.pattern or "")
    if scheme is None:
        raise CannotEncodeError("gigatoken does not know the --tiktoken-pattern")
    return gigatoken.Tokenizer.from_tiktoken(file.path, scheme, {_END: eod_id})


def _with_one_special_token(tokenizer_json: str | bytes, eod_id: int) -> bytes:
    content = orjson.loads(tokenizer_json)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        *(token for token in content.get("added_tokens") or [] if not token["special"]),
        {"id": eod_id, "content": _END, **flags, "special": True},
    ]
    # What is put around a text, cut off or filled up belongs to another use of the file.
    content |= {"post_processor": None, "truncation": None, "padding": None}
    return orjson.dumps(content)


def with_gigatoken(tokenizer: Tokenizer) -> Tokenizer:
    """``tokenizer`` with gigatoken in it, which was found to agree with it before.

    Raises:
        UserError: if the package is missing or does not take the tokenizer.
    """
    try:
        stand_in = GigatokenEncoder(tokenizer.file, tokenizer.encoder, tokenizer.eod_id)
    except CannotEncodeError as error:
        raise UserError(f"{error}; give --encoder own") from error
    return dataclasses.replace(tokenizer, stand_in=stand_in)


def with_encoder(tokenizer: Tokenizer, choice: EncoderChoice, texts: Iterable[str]) -> Tokenizer:
    """``tokenizer`` with the library in it that ``choice`` asks for.

    Warns, on one line, where gigatoken could not be taken although it was allowed.

    Args:
        tokenizer: as it was loaded.
        choice: see EncoderOptions.
        texts: of what is to be encoded, in which the two libraries are compared; about a million
            characters are taken of the first ones.

    Raises:
        UserError: if ``choice`` is gigatoken and it cannot be used.
    """
    if choice == "own":
        return dataclasses.replace(tokenizer, stand_in=None)
    try:
        stand_in = _agreeing(tokenizer, texts)
    except CannotEncodeError as error:
        if choice == "gigatoken":
            raise UserError(f"--encoder gigatoken: {error}; give --encoder own") from error
        kind = tokenizer.encoder.kind
        warnings.warn(f"{error}: {kind} encodes, which takes longer", stacklevel=2)
        return dataclasses.replace(tokenizer, stand_in=None)
    return dataclasses.replace(tokenizer, stand_in=stand_in)


def _agreeing(tokenizer: Tokenizer, texts: Iterable[str]) -> GigatokenEncoder:
    own = tokenizer.encoder
    sample = [*awkward_texts(own.special_tokens()), *_sample(texts)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        by_own = pool.submit(own.encode_batch, sample)
        stand_in = GigatokenEncoder(tokenizer.file, own, tokenizer.eod_id)
        try:
            differing = stand_in.first_difference(sample, by_own.result)
        except UserError as error:
            raise CannotEncodeError(str(error)) from error
    if differing is not None:
        raise CannotEncodeError(f"gigatoken and {own.kind} encode {differing[:40]!r} otherwise")
    return stand_in


def _sample(texts: Iterable[str]) -> Iterator[str]:
    taken = 0
    for text in texts:
        middle = max(_SAMPLE_PIECE, (len(text) - _SAMPLE_PIECE) // 2)
        for start in (0, middle):
            piece = text[start : start + _SAMPLE_PIECE]
            taken += len(piece)
            yield piece
        if taken >= _SAMPLE_CHARACTERS:
            return
