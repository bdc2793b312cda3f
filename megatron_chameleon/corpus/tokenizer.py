"""A tokenizer: its file in any of the supported formats, its identity, and encoding documents."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from megatron_chameleon.artifacts import Corpus, TokenizerIdentity
from megatron_chameleon.artifacts.corpus import tokenizer_hash
from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.corpus.encoders import (
    Encoder,
    JsonEncoder,
    SentencePieceEncoder,
    TiktokenEncoder,
    TokenizerKind,
    is_tiktoken,
    pattern_and_special_tokens,
)
from megatron_chameleon.corpus.indexed import TokenType, token_type
from megatron_chameleon.errors import UserError

# Name of the file inside a corpus.
FILE_NAMES: Mapping[TokenizerKind, str] = MappingProxyType(
    {
        "tokenizers": "tokenizer.json",
        "sentencepiece": "tokenizer.model",
        "tiktoken": "tokenizer.tiktoken",
    }
)
# File names searched in a folder.
_IN_A_FOLDER = ("tokenizer.json", "tokenizer.model", "*.tiktoken")
# GPT-2's vocabulary -> its merges: as transformers (and, with a prefix, Megatron-LM) and as the
# first release of GPT-2 name them.
_GPT2_NAMES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}
_CANDIDATES_SHOWN = 10
_MOST_TOKENS = 2**31 - 1

# Longer texts are encoded in parts: tokenizers takes about 100 bytes of memory a character, and
# tiktoken fails on a million spaces in a row. A part is long enough for the boundary to make no
# difference.
LONGEST_PART = 500_000
# Range before the end of a part that is searched for a boundary.
_WINDOW = 4096
# Where every known pattern has a boundary, best first: at a space between two words, at the last of
# several spaces, and after a line.
_BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")
_PLACES = (_BETWEEN_WORDS, re.compile(r"(?= \S)"), re.compile(r"(?<=\S\n)(?=\S)"))
# Of long texts; the libraries need many times their size.
_CHARACTERS_AT_ONCE = 2_000_000
# Tokens of some texts, each followed by the end-of-document token, and their lengths, int64.
_Encoded = tuple[NDArray[np.integer], NDArray[np.int64]]


@dataclasses.dataclass(frozen=True)
class TokenizerFile:
    """Everything that determines the ids of a text.

    Attributes:
        path: of the file that was read.
        kind: its library.
        content: of the file that a corpus keeps, which differs from ``path`` if several files were
            combined.
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
        """Open the file in its library. Raises UserError if it cannot be read there."""
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
    """Read the tokenizer at ``path``, a file or a folder that holds one.

    Args:
        path: a tokenizer.json, a vocab.json with its merges.txt, a tiktoken file, a SentencePiece
            .model, or a folder.
        tiktoken_pattern: see EncoderOptions; an error for other files.
        eod_token: see :func:`pattern_and_special_tokens`.

    Raises:
        UserError: if there is none, its format is unknown, or its pattern is not known.
    """
    file = find_tokenizer_file(path)
    kind, content = _kind_and_content(file)
    if kind == "tiktoken":
        pattern, special = pattern_and_special_tokens(file, content, tiktoken_pattern, eod_token)
        return TokenizerFile(file, kind, content, pattern, special)
    if tiktoken_pattern is not None:
        raise UserError(
            f"--tiktoken-pattern has no effect: {file} is not a tiktoken file; leave it out"
        )
    return TokenizerFile(file, kind, content)


def recorded_tokenizer_file(path: Path, identity: TokenizerIdentity) -> TokenizerFile:
    """The tokenizer at ``path``, with the pattern and special tokens that a corpus has recorded."""
    file = find_tokenizer_file(path)
    kind, content = _kind_and_content(file)
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
        # A tokenizer.json next to a pair of GPT-2 files was made from them.
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


def _kind_and_content(file: Path) -> tuple[TokenizerKind, bytes]:
    """The library of a file, and the content that a corpus keeps."""
    if file.name.endswith(tuple(_GPT2_NAMES)):
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
        f"{file}: a tokenizer must be a tokenizer.json, a vocab.json with its merges.txt, a "
        "tiktoken file or a SentencePiece .model; tools/train_tokenizer.py makes the first or the "
        "last"
    )


# GPT-2's vocab.json and merges.txt


def vocab_file_in(folder: Path) -> Path | None:
    """The vocabulary in ``folder``, if it is there with its merges."""
    for vocab, merges in _GPT2_NAMES.items():
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab
    return None


def tokenizer_json_of(vocab_file: Path) -> bytes:
    """A tokenizer.json that encodes like GPT-2's ``vocab_file`` and the merges next to it.

    Words are split as in GPT-2. Entries that no merge produces are the special tokens. The same
    files give the same bytes.

    Raises:
        UserError: if the merges are missing, or the files do not make a byte-level BPE.
    """
    ending = next(name for name in _GPT2_NAMES if vocab_file.name.endswith(name))
    merges_file = vocab_file.with_name(vocab_file.name.removesuffix(ending) + _GPT2_NAMES[ending])
    if not merges_file.is_file():
        raise UserError(f"{merges_file} is missing; {vocab_file} needs its merges")
    vocab = _read_vocab(vocab_file)
    merges = _read_merges(merges_file, vocab_file, vocab)
    made = {left + right for left, right in merges}.union(ByteLevel.alphabet())
    ordered = sorted(vocab.items(), key=lambda entry: entry[1])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = [
        {"id": number, "content": token, **flags, "special": True}
        for token, number in ordered
        if token not in made
    ]
    by_bytes: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False}
    by_bytes |= {"trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": by_bytes,
        "post_processor": None,
        "decoder": by_bytes,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": dict(ordered),
            "merges": [" ".join(merge) for merge in merges],
        },
    }
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8")


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        vocab = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); use GPT-2's vocabulary") from error
    if not isinstance(vocab, dict) or not all(type(number) is int for number in vocab.values()):
        raise UserError(f"{path} does not map tokens to ids, as GPT-2's vocabulary does")
    missing = [char for char in sorted(ByteLevel.alphabet()) if char not in vocab]
    if missing:
        raise UserError(
            f"{path} has no entry for {len(missing)} of the 256 bytes ({missing[0]!r} for one): "
            "it is not of a byte-level BPE, as GPT-2's is"
        )
    return vocab


def _read_merges(path: Path, vocab_file: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); use GPT-2's merges") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        # Only on the first line: there are merges that begin with '#'.
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split()
        if len(pair) != 2 or not vocab.keys() >= {*pair, "".join(pair)}:
            raise UserError(
                f"{path}:{number} is not a merge of two entries of {vocab_file} into a third"
            )
        merges.append((pair[0], pair[1]))
    return merges


class FastEncoder(Protocol):
    """Encoder that replaces the tokenizer's library for preprocessing."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token ids of each text, [num_tokens] uint32, without special tokens."""
        ...

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]] | None:
        """Tokens of all texts with end-of-document tokens, and lengths; None if unsupported."""
        ...


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer: encode and decode text.

    Attributes:
        file: everything that determines the ids.
        encoder: encoder of the file's library.
        eod_id: id of the end-of-document token.
        fast_encoder: faster encoder with the same ids, if any.
    """

    file: TokenizerFile
    encoder: Encoder
    eod_id: int
    fast_encoder: FastEncoder | None = None

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
    def token_type(self) -> TokenType:
        """Integer type of a token on disk."""
        return token_type(self.vocab_size)

    @property
    def identity(self) -> TokenizerIdentity:
        """Its record in corpus.json; ``file`` is the name of the corpus's copy."""
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
        """Write the file that a corpus keeps into ``folder``, under the name in ``identity``."""
        self.file.save(folder)

    def _encode(self, texts: Sequence[str]) -> _Encoded:
        together = None if self.fast_encoder is None else self.fast_encoder.encode_documents(texts)
        if together is not None:
            return together[0].astype(self.token_type), together[1]
        encoded = (self.fast_encoder or self.encoder).encode_batch(texts)
        end = np.array([self.eod_id], dtype=np.uint32)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) + 1
        _check_lengths(lengths)
        ended = [end[:0], *itertools.chain.from_iterable((ids, end) for ids in encoded)]
        # Concatenate and convert to the type on disk in one copy.
        return np.concatenate(ended, dtype=self.token_type, casting="unsafe"), lengths

    def _encode_in_parts(self, texts: Sequence[str]) -> _Encoded:
        """Encode the parts of long texts, and remove the end-of-document tokens within texts."""
        parts_of = [list(parts(text, self._drops_space)) for text in texts]
        groups = _groups(itertools.chain.from_iterable(parts_of))
        encoded = [self._encode(group) for group in groups]
        tokens = np.concatenate([tokens for tokens, _ in encoded])
        lengths = np.concatenate([lengths for _, lengths in encoded])
        counts = np.array(list(map(len, parts_of)))
        is_inner = np.ones(lengths.size, dtype=bool)
        is_inner[np.cumsum(counts) - 1] = False
        tokens = np.delete(tokens, np.cumsum(lengths)[is_inner] - 1)
        return tokens, np.add.reduceat(lengths - is_inner, np.cumsum(counts) - counts)

    @functools.cached_property
    def _drops_space(self) -> bool:
        """Whether the tokens of 'a b' are those of 'a' and 'b', a space being put before each."""
        whole, first, second = self.encoder.encode_batch(["a b", "a", "b"])
        return np.array_equal(whole, np.concatenate([first, second]))


def parts(text: str, drop_space: bool, longest: int = LONGEST_PART) -> Iterator[str]:
    """Divide a text into parts whose tokens, one after the other, are those of the text.

    Each part ends before a word or a line in the last 4096 of its ``longest`` characters. If there
    is none (millions of spaces, or a text without any), it ends there, and a token or two differ
    from those of the whole text.

    Args:
        text: to divide.
        drop_space: whether the space between two words is dropped at a boundary, because the
            tokenizer puts one before every text.
        longest: characters of a part.
    """
    start = 0
    while len(text) - start > longest:
        end = start + longest
        cut, pattern = _last_place(text, max(start + 1, end - _WINDOW), end)
        yield text[start:cut]
        start = cut + (1 if drop_space and pattern is _BETWEEN_WORDS else 0)
    yield text[start:]


def _last_place(text: str, start: int, end: int) -> tuple[int, re.Pattern[str] | None]:
    for pattern in _PLACES:
        places = [place.start() for place in pattern.finditer(text, start, end)]
        if places:
            return places[-1], pattern
    return end, None


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


def _check_lengths(lengths: NDArray[np.int64]) -> None:
    longest = lengths.max(initial=0)
    if longest > _MOST_TOKENS:
        raise UserError(
            f"a document has {longest} tokens, more than the {_MOST_TOKENS} of the .idx format; "
            "divide it"
        )


def load_tokenizer(path: Path, eod_token: str, tiktoken_pattern: str | None = None) -> Tokenizer:
    """Load the tokenizer at ``path``.

    Args:
        path: see :func:`read_tokenizer_file`.
        eod_token: name of the end-of-document token.
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
            f"{file.path} recognizes '{eod_token}' in text, which can end a document there: it is "
            "not a special token of this tokenizer",
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
            f"differs); use the original {own}, or preprocess again"
        )
    return Tokenizer(file, file.open(), corpus.tokenizer.eod_id)
