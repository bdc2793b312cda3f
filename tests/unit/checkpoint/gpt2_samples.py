"""A small GPT-2 as transformers has it, and the weights in folders of such models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TEXTS = [f"the {word} of a text, and {number} more\n" for number, word in enumerate("abcdefgh" * 9)]
VOCAB_SIZE, POSITIONS = 300, 24
WEIGHTS = "model.safetensors"
# Of weights that are small: logits are about 1.
CONFIG: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 3,
    "n_embd": 150,
    "n_positions": POSITIONS,
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.2,
    "bos_token_id": VOCAB_SIZE - 1,
    "eos_token_id": VOCAB_SIZE - 1,
}


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
