"""A checkpoint with random weights, its tokenizer and a Hugging Face copy, to score text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fixtures.task_data import Words

EOD_TOKEN, POSITIONS = "<|endoftext|>", 256
SMALL: dict[str, Any] = {"vocab_size": 601, "n_positions": POSITIONS, "n_layer": 4, "n_head": 4}
# With small weights, the model would give different answers almost the same score.
SMALL |= {"n_embd": 64, "initializer_range": 0.1}


@dataclasses.dataclass(frozen=True)
class TextCheckpoint:
    """Paths of a checkpoint of step 0, its exported Hugging Face folder, and its tokenizer."""

    checkpoint: Path
    exported: Path
    tokenizer: Path


def write_text_checkpoint(
    folder: Path, texts: Iterator[str] | None = None, **config: Any
) -> TextCheckpoint:
    """Write a GPT-2 of random weights and a tokenizer trained on ``texts``.

    Args:
        folder: target folder.
        texts: training text of the tokenizer; made-up sentences by default.
        config: arguments of transformers' GPT2Config; a small model by default.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from megatron_chameleon.checkpoint.convert import (
        convert_from_huggingface,
        convert_to_huggingface,
    )
    from megatron_chameleon.checkpoint.options import FromHuggingFaceOptions, ToHuggingFaceOptions
    from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe

    config = config or SMALL
    texts = texts or iter([Words("tokenizer").text(2000)])
    model, checkpoint, exported = folder / "model", folder / "checkpoint", folder / "exported"
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**config)).save_pretrained(model)
    tokenizer = model / "tokenizer.json"
    tokenizer.write_bytes(byte_level_bpe(texts, config["vocab_size"], EOD_TOKEN))
    convert_from_huggingface(FromHuggingFaceOptions(model=model, output=checkpoint))
    convert_to_huggingface(ToHuggingFaceOptions(checkpoint=checkpoint, output=exported))
    return TextCheckpoint(checkpoint, exported, tokenizer)
