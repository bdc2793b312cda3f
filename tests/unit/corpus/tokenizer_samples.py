"""The byte-level BPE of a tokenizer.json in other file formats."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

EOD = "<|endoftext|>"
# Characters whose neighbours determine how text is split.
AWKWARD_CHARACTERS = " \n\r\t\u00a0\u2003'sSlLa1½_!/<|>éÄ世\u0301🌍"


def awkward_text() -> st.SearchStrategy[str]:
    """Short texts of characters that are split in different ways."""
    return st.text(st.sampled_from(AWKWARD_CHARACTERS), max_size=12)


def byte_of_character() -> dict[str, int]:
    """GPT-2's characters for bytes: printable bytes are kept, others become 256 and above."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    table = {chr(value): value for value in printable}
    table |= {chr(256 + place): value for place, value in enumerate(others)}
    assert set(table) == set(ByteLevel.alphabet())
    return table


def write_gpt2_files(tokenizer_json: Path, folder: Path, prefix: str = "") -> Path:
    """Write vocab.json and merges.txt; return the path of vocab.json."""
    model = json.loads(tokenizer_json.read_text())["model"]
    vocab_file = folder / f"{prefix}vocab.json"
    vocab_file.write_text(json.dumps(model["vocab"]))
    merges = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"]), ""]
    (folder / f"{prefix}merges.txt").write_text("\n".join(merges))
    return vocab_file


def write_tiktoken(tokenizer_json: Path, path: Path) -> Path:
    """Write a tiktoken file of all entries but the end-of-document token, ranked by id."""
    vocab = json.loads(tokenizer_json.read_text())["model"]["vocab"]
    table = byte_of_character()
    tokens = [token for token in sorted(vocab, key=vocab.__getitem__) if token != EOD]
    lines = [
        base64.b64encode(bytes(table[character] for character in token)) + b" %d\n" % rank
        for rank, token in enumerate(tokens)
    ]
    path.write_bytes(b"".join(lines))
    return path


def write_pairs(path: Path) -> Path:
    """Write a tiktoken file in which all pairs of awkward characters' bytes are merged.

    The tokens of a text depend on where it is split into words.
    """
    ranks = {bytes([value]): value for value in range(256)}
    encoded = [character.encode() for character in AWKWARD_CHARACTERS]
    starts = sorted(
        {character[:end] for character in encoded for end in range(2, 5)} - ranks.keys()
    )
    for token in [*starts, *(one + other for one in encoded for other in encoded)]:
        ranks.setdefault(token, len(ranks))
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    path.write_bytes(b"".join(lines))
    return path
