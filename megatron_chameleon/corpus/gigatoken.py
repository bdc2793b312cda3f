"""Encode with the gigatoken package if its token ids equal those of the tokenizer's own library.

On one core, gigatoken is about fifty times as fast as the ``tokenizers`` library. The ids of both
libraries are compared before use, on a sample of the text and on difficult texts, and periodically
during use. Texts with characters that only some Unicode releases define are encoded by the
tokenizer's own library, since gigatoken is known to encode them differently.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import orjson
import psutil
from numpy.typing import NDArray

from megatron_chameleon.corpus.options import EncoderChoice
from megatron_chameleon.corpus.tokenizer import (
    PATTERNS,
    Encoder,
    Tokenizer,
    TokenizerFile,
    is_panic,
)
from megatron_chameleon.errors import UserError, one_line

_SAMPLE_CHARACTERS = 1 << 20
# Number of characters sampled from the start of each text, and again from its middle.
_SAMPLE_CHUNK = 1 << 13
# Number of characters between two comparisons, and number of characters that each comparison
# encodes. Comparing takes about 1% of gigatoken's time.
_COMPARE_EVERY = 1 << 22
_COMPARE_CHARACTERS = 512
# gigatoken caches every word, so its memory keeps growing. It is reloaded once the memory of the
# process has grown by this many bytes.
_MAX_GROWTH_BYTES = 200_000_000
_CHECK_MEMORY_EVERY = 1 << 24  # characters

# Special token that marks the end of a document for gigatoken. No proper prefix of the mark is also
# its suffix, so the end of a text and the beginning of the mark never form a mark together. A text
# that contains the mark is encoded by the tokenizer's own library.
_END = "\x1f\x00end of document\x00"

# tiktoken pattern -> name of this pattern in gigatoken.
_SCHEMES = {
    PATTERNS["gpt2"]: "gpt2",
    PATTERNS["cl100k_base"]: "gpt4",
    PATTERNS["o200k_base"]: "o200k",
    PATTERNS["llama3"]: "olmo3",
}

_MAX_SPECIAL_TOKENS = 300
# New pictographs do not make a text unstable: Unicode adds some each year, but they are never
# letters or digits.
_PICTOGRAPHS = slice(0x1F300, 0x1FB00)
# Letters, digits, marks and spaces that Unicode defined after release 14. They are listed here in
# case Python's own tables are of a newer release.
_NEW = """
558 58B-58C 5C8-5C9 88F 897 B53-B54 C5C CDC CF3 ECE 1ACF-1AF0 1C89-1C8A 208F 209D-209F A7CB-A7CF
A7D2 A7D4 A7DA-A7F1 AB6C-AB6D 105C0-105F3 107BB-107BF 10940-10959 10D40-10D85 10EC2-10EFF
1123F-11241 11380-113E2 116D0-116E3 11B0A-11BF9 11DB0-11DF1 11F00-11F5A 1246F 12475-1247F
12550-12686 1342F 13440-143FA 16100-16139 16D40-16D79 16EA0-16ED3 16FF2-16FF6 187F8-187FF
18CD6-18CFF 18D09-191D2 1B123-1B132 1B155 1B168 1CCF0-1CCF9 1D127-1D128 1D250-1D2D3 1D6A6
1DF1F-1DFFF 1E030-1E08F 1E4D0-1E6FF 2B739-2B73F 2B81E 2CEA2-2CEAD 2EBF0-2EE5D 31350-3FC3F
"""


@functools.cache
def unstable_characters() -> NDArray[np.bool_]:
    """Mask [0x110000] of the characters that the Unicode releases in use classify differently.

    Libraries use the tables of different Unicode releases. If a character is a letter in one
    release and undefined in another, one library splits it from its neighbours and the other does
    not. Unicode does not change the properties of a defined character, so a character is unstable
    if it was undefined in release 14, the oldest in use.
    """
    categories = map(unicodedata.category, map(chr, range(0x110000)))
    unstable = np.fromiter((category == "Cn" for category in categories), np.bool_, 0x110000)
    for first, _, last in (part.partition("-") for part in _NEW.split()):
        unstable[int(first, 16) : int(last or first, 16) + 1] = True
    unstable[_PICTOGRAPHS] = False
    return unstable


def is_stable(text: str) -> bool:
    """Whether all Unicode releases in use classify the characters of ``text`` in the same way."""
    if text.isascii():
        return True
    characters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    return not unstable_characters()[characters].any()


class GigatokenEncoder:
    """Encode with gigatoken, and check periodically that ``own`` gives the same ids.

    Args:
        file: tokenizer file.
        own: encoder of the tokenizer's own library for the same file.
        eod_id: id of the end-of-document token.

    Raises:
        UserError: if the package is missing or does not support the tokenizer.
    """

    def __init__(self, file: TokenizerFile, own: Encoder, eod_id: int) -> None:
        self._file, self._own, self._eod_id = file, own, eod_id
        self._process = psutil.Process()
        self._since_comparison = self._since_memory_check = 0
        self._load()

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Encode texts on one core; ``own`` encodes texts that gigatoken may split differently.

        Returns:
            tokens [num_tokens] uint32 of all texts, each with its end-of-document token, and
            lengths [num_texts] int64.

        Raises:
            UserError: if the libraries' ids differ for a compared text.
        """
        self._compare_and_trim(texts)
        if all(map(is_stable, texts)):
            tokens = self._encode(texts)
            ends = np.flatnonzero(tokens == self._eod_id)
            if ends.size == len(texts):  # no text contains _END
                return tokens, np.diff(ends, prepend=-1)
        end = np.array([self._eod_id], np.uint32)
        encoded = [
            self._encode([text])
            if self._supports(text)
            else np.append(self._own.encode_batch([text])[0], end)
            for text in texts
        ]
        return np.concatenate(encoded), np.array([ids.size for ids in encoded])

    def first_difference(
        self, texts: Sequence[str], reference_ids: Callable[[], Sequence[NDArray[np.uint32]]]
    ) -> str | None:
        """First text whose token ids differ from the reference tokenizer's; None if all agree.

        ``reference_ids`` is called last, so that another thread can compute its result meanwhile.
        """
        supported = [self._supports(text) for text in texts]
        tokens = self._encode(list(itertools.compress(texts, supported)))
        expected = itertools.compress(zip(texts, reference_ids(), strict=True), supported)
        start = 0
        for text, ids in expected:
            stop = start + ids.size + 1
            if not np.array_equal(tokens[start:stop], [*ids, self._eod_id]):
                return text
            start = stop
        return None

    def _supports(self, text: str) -> bool:
        return is_stable(text) and _END not in text

    def _encode(self, texts: Sequence[str]) -> NDArray[np.uint32]:
        """Token ids of all texts, with the end-of-document token after each."""
        try:
            return self._gigatoken(_END.encode().join([*map(str.encode, texts), b""]))
        except BaseException as error:
            if not is_panic(error):
                raise
            longest = max(texts, key=len)
            raise UserError(
                f"gigatoken fails on texts of up to {len(longest)} characters; the longest text "
                f"begins with {longest[:40]!r} ({error}); use --encoder own"
            ) from None

    def _compare_and_trim(self, texts: Sequence[str]) -> None:
        """Periodically compare the libraries on a text, and reload gigatoken if it has grown."""
        num_characters = sum(map(len, texts))
        self._since_comparison += num_characters
        if self._since_comparison >= _COMPARE_EVERY:
            self._since_comparison = 0
            text = max(texts, key=len)
            start = max(0, (len(text) - _COMPARE_CHARACTERS) // 2)
            compared = [text[start : start + _COMPARE_CHARACTERS]]
            differing = self.first_difference(compared, lambda: self._own.encode_batch(compared))
            if differing is not None:
                raise UserError(
                    f"gigatoken and {self._file.kind} encode {differing[:40]!r}... differently: "
                    "remove the unfinished --output and run again with --encoder own"
                )
        self._since_memory_check += num_characters
        if self._since_memory_check >= _CHECK_MEMORY_EVERY:
            self._since_memory_check = 0
            if self._process.memory_info().rss - self._loaded_bytes > _MAX_GROWTH_BYTES:
                del self._gigatoken  # release its memory before loading it again
                self._load()

    def _load(self) -> None:
        self._gigatoken = gigatoken_for(self._file, self._eod_id)
        self._loaded_bytes = self._process.memory_info().rss


def gigatoken_for(file: TokenizerFile, eod_id: int) -> Callable[[bytes], NDArray[np.uint32]]:
    """Return a gigatoken function that converts UTF-8 to token ids for the tokenizer ``file``.

    The file's special tokens are removed, since gigatoken would recognize them in text. ``_END`` is
    the only special token, so that one call can encode many documents.

    Raises:
        UserError: if the package is missing or does not support the tokenizer.
    """
    scheme = _SCHEMES.get(file.pattern or "")
    if file.kind == "tiktoken" and scheme is None:
        raise UserError("gigatoken does not support the --tiktoken-pattern")
    try:
        import gigatoken

        if file.kind == "tiktoken":
            tokenizer = gigatoken.Tokenizer.from_tiktoken(file.path, scheme, {_END: eod_id})
        else:
            json: str | bytes = file.content
            if file.kind == "sentencepiece":
                # Convert the file here, since gigatoken.Tokenizer would add its special tokens.
                from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

                json = sentencepiece_to_tokenizer_json(file.content)
            tokenizer = gigatoken.Tokenizer.from_json(_with_one_special_token(json, eod_id))
    except ImportError:
        raise UserError("the gigatoken package is not installed") from None
    except BaseException as error:
        # Catch all exceptions, since those of gigatoken have no common base class.
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise UserError(f"gigatoken does not support {file.path} ({one_line(error)})") from error

    def encode(text: bytes) -> NDArray[np.uint32]:
        # The text is encoded as a batch, which releases the GIL, and with padding, for which
        # gigatoken returns numpy arrays. BytesSource avoids importing awkward and pyarrow.
        source = gigatoken.BytesSource(text)
        rows, _ = tokenizer.encode_batch_padded(source, pad_id=0, parallel=False)
        tokens: NDArray[np.uint32] = rows[0]
        return tokens

    return encode


def _with_one_special_token(tokenizer_json: str | bytes, eod_id: int) -> bytes:
    content: dict[str, Any] = orjson.loads(tokenizer_json)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        *(token for token in content.get("added_tokens") or [] if not token["special"]),
        {"id": eod_id, "content": _END, **flags, "special": True},
    ]
    # Ignore the file's templates, truncation, padding and dropout.
    content |= {"post_processor": None, "truncation": None, "padding": None}
    content["model"]["dropout"] = None
    return orjson.dumps(content)


def with_gigatoken(tokenizer: Tokenizer) -> Tokenizer:
    """Return ``tokenizer`` with gigatoken as its fast encoder, without comparing ids.

    Raises:
        UserError: if the package is missing or does not support the tokenizer.
    """
    fast_encoder = GigatokenEncoder(tokenizer.file, tokenizer.encoder, tokenizer.eod_id)
    return dataclasses.replace(tokenizer, fast_encoder=fast_encoder)


def with_encoder(tokenizer: Tokenizer, choice: EncoderChoice, texts: Iterable[str]) -> Tokenizer:
    """Return ``tokenizer`` with the encoder that ``choice`` selects.

    A warning is printed if ``choice`` allows gigatoken, but gigatoken cannot be used.

    Args:
        tokenizer: tokenizer without a fast encoder.
        choice: value of ``EncoderOptions.encoder``.
        texts: input texts; about the first million characters are compared.

    Raises:
        UserError: if ``choice`` is gigatoken, and gigatoken cannot be used.
    """
    if choice == "own":
        return tokenizer
    own, library = tokenizer.encoder, tokenizer.file.kind
    sample = [*difficult_texts(own.special_tokens()), *_sample(texts)]
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reference_ids = pool.submit(own.encode_batch, sample)
            fast = GigatokenEncoder(tokenizer.file, own, tokenizer.eod_id)
            differing = fast.first_difference(sample, reference_ids.result)
        if differing is not None:
            raise UserError(f"gigatoken and {library} encode {differing[:40]!r} differently")
    except UserError as error:
        if choice == "gigatoken":
            raise UserError(f"--encoder gigatoken: {error}; use --encoder own") from error
        warnings.warn(f"{error}: using {library}, which is slower", stacklevel=2)
        return tokenizer
    return dataclasses.replace(tokenizer, fast_encoder=fast)


def _sample(texts: Iterable[str]) -> Iterator[str]:
    taken = 0
    for text in texts:
        middle = max(_SAMPLE_CHUNK, (len(text) - _SAMPLE_CHUNK) // 2)
        for start in (0, middle):
            chunk = text[start : start + _SAMPLE_CHUNK]
            taken += len(chunk)
            yield chunk
        if taken >= _SAMPLE_CHARACTERS:
            return


def difficult_texts(special_tokens: Iterable[str]) -> list[str]:
    """About 500 texts (50 KB) on which two libraries for one tokenizer may differ.

    Some of the texts contain ``special_tokens``.
    """
    spaces = [" ", "\n", "\t", "\r\n", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\v\f\x85"]
    runs = [space * count for space in spaces for count in (1, 2, 3, 300)]
    names = list(itertools.islice(special_tokens, _MAX_SPECIAL_TOKENS))
    characters = [
        *range(0x100, 0x800, 17),
        *range(0x800, 0xD800, 611),
        *range(0xE000, 0x10000, 611),
        *range(0x10000, 0x110000, 5003),
    ]
    return [
        "",
        *runs,
        *[f"x{run}y" for run in runs],
        "".join(map(chr, range(256))),
        # Each character is in a text of its own, since unstable texts are not compared.
        *[f"a{chr(n)}b 1{chr(n)}" for n in characters],
        "It's we'LL I'm they'Re 'tis x'y''s d'accord",
        "1 12 123 1234 12345678901234567890 1.5e-3 ½ Ⅳ ٣٤٥ 12ab34",
        "snake_case camelCase SHOUTING mixedCASEWords http://a.b/c?d=e&f#g <html></html> $x^{2}$",
        "世界你好。こんにちは、テスト。안녕하세요 สวัสดี नमस्ते שלום مرحبا Здравствуйте",
        "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 ☎️ 🫨",
        "e\u0301 \u00e9 a\u0308\u0323 \u1e69 \u0327\u0307 \ufb01 \u212b \uff21 \u200b\u200d\ufeff",
        "\ue000 \uf8ff \ufffd \U000e0041 \x00 \x7f",
        "\ufffe \U0010ffff a\U00010940b",
        "a" * 5_000,
        "ab" * 2_000 + "1" * 1_000 + "=" * 1_000 + "世" * 1_000 + "😀" * 300,
        "word " * 500 + "\n" * 300 + " word" * 500,
        *[text for name in names for text in (name, f"a{name} b")],
    ]
