"""A GPT-2 in a folder of transformers' and the checkpoint that is made of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint.convert import convert_from_huggingface, convert_to_huggingface
from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe
from megatron_chameleon.options.convert import FromHuggingFaceOptions, ToHuggingFaceOptions
from tests.unit.checkpoint.gpt2_samples import CONFIG, TEXTS, VOCAB_SIZE
from tests.unit.corpus.tokenizer_samples import EOD


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """What transformers itself writes of a GPT-2, with a tokenizer; for reading only."""
    import transformers

    folder = tmp_path_factory.mktemp("made") / "gpt2"
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG)).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(byte_level_bpe(iter(TEXTS), VOCAB_SIZE, EOD))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy of it, to do with as one likes."""
    return Path(shutil.copytree(made, tmp_path / "gpt2"))


@pytest.fixture(scope="session")
def converted(made, tmp_path_factory):
    """The checkpoint that is made of it; for reading only."""
    output = tmp_path_factory.mktemp("converted") / "checkpoint"
    convert_from_huggingface(FromHuggingFaceOptions(made, output))
    return CheckpointRecord.load(output)


@pytest.fixture
def exported(converted, tmp_path):
    """``exported(**changes)``: the folder that is made of the checkpoint again."""

    def export(**changes):
        convert_to_huggingface(
            ToHuggingFaceOptions(converted.root, tmp_path / "exported", **changes)
        )
        return tmp_path / "exported"

    return export
