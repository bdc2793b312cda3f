"""Whether the ids that a corpus is made of mean to a Hugging Face model what they mean there."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from megatron_chameleon.blend.token_data import TokenData
from megatron_chameleon.corpus.tokenizer import (
    TokenizerFile,
    recorded_tokenizer_file,
    vocab_file_in,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.training import PretrainOptions


def require_meaning(folder: Path, options: PretrainOptions, data: TokenData) -> None:
    """Refuse a corpus whose ids stand for other tokens than those of the model in ``folder``.

    The same vocabulary comes in files of many forms, and with tokens added to it; so files that
    differ are compared token by token. A folder without a tokenizer says nothing of its ids, and
    is taken at the user's word.

    Raises:
        UserError: saying what to do.
    """
    path = folder / "tokenizer.json"
    found = path if path.is_file() else vocab_file_in(folder)
    if found is None:
        return
    model = recorded_tokenizer_file(found, data.tokenizer)
    if model.sha256 == data.tokenizer.sha256:
        return
    corpus = _tokenizer_of(options, data)
    if corpus is None or not _vocabulary(corpus).items() <= _vocabulary(model).items():
        raise UserError(
            f"{found} gives tokens other ids than the tokenizer that {data.where} was made with; "
            f"preprocess the text with --tokenizer-model {folder}, or give another "
            "--pretrained-checkpoint"
        )


def _tokenizer_of(options: PretrainOptions, data: TokenData) -> TokenizerFile | None:
    """What made the tokens of ``data``, if it lies where it was and says what its ids mean."""
    path = options.data.tokenizer_model or Path(data.where) / data.tokenizer.file
    if data.tokenizer.kind != "tokenizers" or not path.exists():
        return None
    return recorded_tokenizer_file(path, data.tokenizer)


def _vocabulary(file: TokenizerFile) -> dict[str, int]:
    """Token -> id, added tokens included. Raises UserError if the file is damaged."""
    file.open()
    return tokenizers.Tokenizer.from_buffer(file.content).get_vocab()
