"""The libraries that turn text into token ids, behind one interface."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import sentencepiece
import tokenizers
from numpy.typing import NDArray

from megatron_chameleon.errors import UserError

TokenizerKind = Literal["tokenizers", "sentencepiece", "tiktoken"]


class Encoder(Protocol):
    """A tokenizer file, opened.

    Special tokens are never read out of the text: '<|endoftext|>' in a document is encoded as the
    characters it is made of, so that no text can end a document.
    """

    kind: TokenizerKind
    vocab_size: int

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token ids of each text, [num_tokens] uint32, and nothing added. Uses all cores."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, None if there is no such token."""
        ...

    def special_tokens(self) -> list[str]:
        """The tokens that stand for no text, by name."""
        ...


class JsonEncoder:
    """A tokenizer.json of the ``tokenizers`` library.

    Args:
        path: where it is from, for messages.
        content: of the file.

    Raises:
        UserError: if the file is no such tokenizer.
    """

    kind: TokenizerKind = "tokenizers"

    def __init__(self, path: Path, content: bytes) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing narrower
            raise unreadable(path, "tokenizer.json of the tokenizers library", error) from error
        # What a file says of cutting and filling up texts belongs to another use of it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        # Ids may have holes: what counts is the largest.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token ids of each text, [num_tokens] uint32, and nothing added. Uses all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def special_tokens(self) -> list[str]:
        """The tokens that stand for no text, by name."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [token.content for _, token in sorted(added.items()) if token.special]


class SentencePieceEncoder:
    """A SentencePiece .model.

    Args:
        path: where it is from, for messages.
        content: of the file.

    Raises:
        UserError: if the file is no such model.
    """

    kind: TokenizerKind = "sentencepiece"

    def __init__(self, path: Path, content: bytes) -> None:
        try:
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (OSError, RuntimeError) as error:
            raise unreadable(path, "SentencePiece model", error) from error
        self.vocab_size = len(self._model)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token ids of each text, [num_tokens] uint32, and nothing added. Uses all cores."""
        encoded = self._model.encode(list(texts), out_type=int, num_threads=num_threads())
        return [np.array(ids, dtype=np.uint32) for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._model.decode(list(ids)))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, None if there is no such token."""
        found = int(self._model.piece_to_id(token))  # the unknown piece's where there is none
        return found if self._model.id_to_piece(found) == token else None

    def special_tokens(self) -> list[str]:
        """The tokens that stand for no text, by name."""
        ids = range(self.vocab_size)
        return [self._model.id_to_piece(i) for i in ids if self._model.is_control(i)]


def num_threads() -> int:
    """Cores to encode on: all that this process may use, or what RAYON_NUM_THREADS says.

    The libraries in Rust go by that variable, in which a worker among several finds its share.
    """
    told = os.environ.get("RAYON_NUM_THREADS", "")
    return int(told) if told.isdecimal() and int(told) else len(os.sched_getaffinity(0))


def unreadable(path: Path, what: str, error: object) -> UserError:
    """What to say of a file that is no tokenizer of the kind it should be."""
    reason = " ".join(str(error).split())
    return UserError(f"{path} is not a {what} ({reason}); tools/train_tokenizer.py makes one")


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up. What it raises then is no Exception, and has no module."""
    return type(error).__name__ == "PanicException"
