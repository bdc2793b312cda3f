from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_chameleon.corpus.options import SourceOptions, TrainTokenizerOptions
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.corpus.train_tokenizer import train_tokenizer
from megatron_chameleon.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
EOD = "<|endoftext|>"


@pytest.fixture
def options(jsonl, texts, tmp_path):
    path = jsonl("a.jsonl", texts(300))
    return TrainTokenizerOptions(
        SourceOptions(((str(path),),)), tmp_path / "tokenizer.json", vocab_size=500
    )


@pytest.fixture(params=["tokenizer.json", "tokenizer.model"])
def either(request, options, tmp_path):
    return dataclasses.replace(options, output=tmp_path / request.param)


def test_the_vocabulary_has_the_size_asked_for_and_the_token(either, capsys):
    train_tokenizer(either)
    tokenizer = load_tokenizer(either.output, EOD)
    assert tokenizer.vocab_size == 500
    printed = capsys.readouterr().out
    assert "500 entries" in printed
    assert f"next: python tools/preprocess_data.py --tokenizer-model {either.output}" in printed


def test_the_same_text_gives_the_same_file_in_another_process(either):
    """Hash seeds differ between processes; the file must not."""
    train_tokenizer(either)
    first = either.output.read_bytes()
    command = [sys.executable, "tools/train_tokenizer.py", "--input", *either.source.inputs]
    command += ["--output", str(either.output), "--vocab-size", "500", "--overwrite"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": "3"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert either.output.read_bytes() == first


def test_too_little_text_is_told(options, jsonl):
    short = SourceOptions(((str(jsonl("short.jsonl", ["ab ab ab"])),),))
    with pytest.warns(UserWarning, match="too small for 500 entries"):
        train_tokenizer(dataclasses.replace(options, source=short))
    with pytest.raises(UserError, match="SentencePiece cannot train --vocab-size 500"):
        train_tokenizer(
            dataclasses.replace(options, source=short, output=options.output.with_suffix(".model"))
        )


def test_an_existing_file_is_replaced_only_when_asked(options):
    options.output.write_text("precious")
    with pytest.raises(UserError, match="exists; choose another --output or pass --overwrite"):
        train_tokenizer(options)
    assert options.output.read_text() == "precious"
    train_tokenizer(dataclasses.replace(options, overwrite=True))
    assert load_tokenizer(options.output, EOD).vocab_size == 500


def test_no_text_is_refused(options, jsonl):
    empty = SourceOptions(((str(jsonl("empty.jsonl", ["", ""])),),))
    with pytest.raises(UserError, match="no text to train on"):
        train_tokenizer(dataclasses.replace(options, source=empty))
