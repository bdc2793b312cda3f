"""A checkpoint of a small model that reads text, with its tokenizer, and what it was made from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.fixtures.task_data import Words

VOCAB_SIZE, POSITIONS = 601, 256
EOD_TOKEN = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class TextCheckpoint:
    """Where things lie.

    Attributes:
        checkpoint: the checkpoint, of step 0.
        exported: the same as a Hugging Face folder, written from it.
        tokenizer: the tokenizer.json that the checkpoint names.
    """

    checkpoint: Path
    exported: Path
    tokenizer: Path


def write_text_checkpoint(folder: Path) -> TextCheckpoint:
    """Write a GPT-2 of random weights, which are large enough to have opinions."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from megatron_chameleon.checkpoint.convert import (
        convert_from_huggingface,
        convert_to_huggingface,
    )
    from megatron_chameleon.checkpoint.options import FromHuggingFaceOptions, ToHuggingFaceOptions
    from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe

    model, checkpoint, exported = folder / "model", folder / "checkpoint", folder / "exported"
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=POSITIONS,
        n_layer=4,
        n_head=4,
        n_embd=64,
        initializer_range=0.1,
    )
    GPT2LMHeadModel(config).save_pretrained(model)
    texts = iter([Words("tokenizer").text(2000)])
    (model / "tokenizer.json").write_bytes(byte_level_bpe(texts, VOCAB_SIZE, EOD_TOKEN))
    convert_from_huggingface(FromHuggingFaceOptions(model=model, output=checkpoint))
    convert_to_huggingface(ToHuggingFaceOptions(checkpoint=checkpoint, output=exported))
    return TextCheckpoint(checkpoint, exported, model / "tokenizer.json")
