"""Small texts as JSON lines, and tokenizers trained on them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_chameleon.corpus.options import PreprocessOptions
from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe, sentencepiece_bpe
from tests.unit.corpus.corpus_making import source_options

VOCAB_SIZE = 400
EOD = "<|endoftext|>"


def some_texts(count: int, seed: int = 0, words: int = 30) -> list[str]:
    """Return distinct texts of repeated words, with white space of all kinds between them."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(200)]
    spaces = [" ", " ", " ", "\n", "    ", "\t"]
    return [
        "".join(rng.choice(vocabulary) + rng.choice(spaces) for _ in range(rng.randint(1, words)))
        + f"{seed}-{i}"
        for i in range(count)
    ]


@pytest.fixture
def texts() -> Callable[..., list[str]]:
    """Return :func:`some_texts`."""
    return some_texts


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes JSON lines from texts, dictionaries or raw bytes."""

    def write(name: str, items: Iterable[str | dict[str, Any] | bytes]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            item
            if isinstance(item, bytes)
            else json.dumps({"text": item} if isinstance(item, str) else item).encode()
            for item in items
        ]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(byte_level_bpe(iter(some_texts(200)), VOCAB_SIZE, EOD))
    return path


@pytest.fixture
def preprocessing(tmp_path: Path, tokenizer_json: Path) -> Callable[..., PreprocessOptions]:
    """``preprocessing(*inputs, output="corpus", **changes)``: options for one process."""

    def options(*inputs: object, output: str = "corpus", **changes: Any) -> PreprocessOptions:
        fixed: dict[str, Any] = {"split": "60,20,20", "workers": 1}
        fixed |= {"tokenizer_model": tokenizer_json, **changes}
        return PreprocessOptions(source_options(*inputs), tmp_path / output, **fixed)

    return options


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(sentencepiece_bpe(iter(some_texts(200)), VOCAB_SIZE, EOD))
    return path
