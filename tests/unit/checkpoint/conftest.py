"""A GPT-2 in a Hugging Face folder, and the checkpoint converted from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint.convert import convert_from_huggingface, convert_to_huggingface
from megatron_chameleon.checkpoint.options import FromHuggingFaceOptions, ToHuggingFaceOptions
from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe
from tests.unit.checkpoint.samples import CONFIG, TEXTS, VOCAB_SIZE
from tests.unit.corpus.tokenizer_samples import EOD


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A folder that transformers wrote, with a tokenizer; read-only."""
    import transformers

    folder = tmp_path_factory.mktemp("made") / "gpt2"
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG)).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(byte_level_bpe(iter(TEXTS), VOCAB_SIZE, EOD))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy of it that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "gpt2"))


@pytest.fixture(scope="session")
def converted(made, tmp_path_factory):
    """The checkpoint converted from it; read-only."""
    output = tmp_path_factory.mktemp("converted") / "checkpoint"
    convert_from_huggingface(FromHuggingFaceOptions(made, output))
    return CheckpointRecord.load(output)


@pytest.fixture
def exported(converted, tmp_path):
    """``exported(**changes)``: the folder converted from the checkpoint."""

    def export(**changes):
        convert_to_huggingface(
            ToHuggingFaceOptions(converted.root, tmp_path / "exported", **changes)
        )
        return tmp_path / "exported"

    return export
