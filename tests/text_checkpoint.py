"""A checkpoint with random weights, its tokenizer and a Hugging Face copy, to score text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fixtures.task_data import Words

EOD_TOKEN, POSITIONS = "<|endoftext|>", 256
# With small weights, the model would give different answers almost the same score.
_COMMON: dict[str, Any] = {"vocab_size": 601, "initializer_range": 0.1}
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {**_COMMON, "n_positions": POSITIONS, "n_layer": 4, "n_head": 4, "n_embd": 64},
    "llama": {
        **_COMMON,
        "max_position_embeddings": POSITIONS,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
    },
}
"""Fields of the config.json of small models."""


@dataclasses.dataclass(frozen=True)
class TextCheckpoint:
    """Paths of a checkpoint of step 0, its exported Hugging Face folder, and its tokenizer."""

    checkpoint: Path
    exported: Path
    tokenizer: Path


def write_text_checkpoint(
    folder: Path, texts: Iterator[str] | None = None, family: str = "gpt2", **config: Any
) -> TextCheckpoint:
    """Write a model of random weights and a tokenizer trained on ``texts``.

    Args:
        folder: target folder.
        texts: training text of the tokenizer; made-up sentences by default.
        family: transformers' name of the model's family.
        config: fields of transformers' config; by default those of ``SMALL``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron_chameleon.checkpoint.convert import (
        convert_to_checkpoint,
        convert_to_huggingface,
    )
    from megatron_chameleon.checkpoint.options import FromHuggingFaceOptions, ToHuggingFaceOptions
    from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe

    config = config or SMALL[family]
    texts = texts or iter([Words("tokenizer").text(2000)])
    model, checkpoint, exported = folder / "model", folder / "checkpoint", folder / "exported"
    torch.manual_seed(0)
    settings = AutoConfig.for_model(family, **config)
    AutoModelForCausalLM.from_config(settings).save_pretrained(model)
    tokenizer = model / "tokenizer.json"
    tokenizer.write_bytes(byte_level_bpe(texts, config["vocab_size"], EOD_TOKEN))
    convert_to_checkpoint(FromHuggingFaceOptions(model=model, output=checkpoint))
    convert_to_huggingface(ToHuggingFaceOptions(checkpoint=checkpoint, output=exported))
    return TextCheckpoint(checkpoint, exported, tokenizer)
