"""GPT-2's pair of files, vocab.json and merges.txt, made into one tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
from tokenizers.pre_tokenizers import ByteLevel

from megatron_chameleon.errors import UserError

# How a file of entries and its file of merges are called: by transformers (and, with a prefix, by
# Megatron-LM), and by the first release of GPT-2.
_NAMES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}


def is_vocab_file(path: Path) -> bool:
    """Whether ``path`` is called as a file of entries is."""
    return _ending(path) is not None


def vocab_file_in(folder: Path) -> Path | None:
    """The file of entries in ``folder``, if it lies there with its merges under a plain name."""
    for vocab, merges in _NAMES.items():
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab
    return None


def tokenizer_json_of(vocab_file: Path) -> bytes:
    """A tokenizer.json that encodes as ``vocab_file`` and the merges beside it say.

    Words are split as in GPT-2. Entries that no merge leads to stand for no text: they are the
    special tokens. The same files give the same bytes.

    Raises:
        UserError: if the merges are missing, or the files do not make a byte-level BPE.
    """
    merges_file = _merges_file(vocab_file)
    vocab = _read_vocab(vocab_file)
    merges = _read_merges(merges_file, vocab_file, vocab)
    made = {left + right for left, right in merges}.union(ByteLevel.alphabet())
    ordered = sorted(vocab.items(), key=lambda entry: entry[1])
    special = [(token, number) for token, number in ordered if token not in made]
    return _tokenizer_json(dict(ordered), merges, special)


def _ending(path: Path) -> str | None:
    return next((name for name in _NAMES if path.name.endswith(name)), None)


def _merges_file(vocab_file: Path) -> Path:
    ending = _ending(vocab_file)
    assert ending is not None
    name = vocab_file.name.removesuffix(ending) + _NAMES[ending]
    merges_file = vocab_file.with_name(name)
    if not merges_file.is_file():
        raise UserError(f"{merges_file} is missing; {vocab_file} is of use only with its merges")
    return merges_file


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        vocab = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); give GPT-2's file of entries") from error
    if not isinstance(vocab, dict) or not all(type(number) is int for number in vocab.values()):
        raise UserError(f"{path} is not a list of entries with their ids, as GPT-2's is")
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
        raise UserError(f"{path} is not UTF-8 text ({error}); give GPT-2's merges") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        # Only on the first line: there are merges that begin with '#'.
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split()
        if len(parts) != 2 or not vocab.keys() >= {*parts, "".join(parts)}:
            raise UserError(
                f"{path}:{number} is not a merge of two entries of {vocab_file} into a third"
            )
        merges.append((parts[0], parts[1]))
    return merges


def _tokenizer_json(
    vocab: dict[str, int], merges: list[tuple[str, str]], special: list[tuple[str, int]]
) -> bytes:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    by_bytes: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False}
    by_bytes |= {"trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **flags, "special": True} for token, number in special
        ],
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
            "vocab": vocab,
            "merges": [" ".join(merge) for merge in merges],
        },
    }
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8")
