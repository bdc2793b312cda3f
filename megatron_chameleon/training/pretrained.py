"""The trained weights that a new run starts from, in place of random ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.artifacts.checkpoint import find_checkpoint
from megatron_chameleon.blend.token_data import TokenData
from megatron_chameleon.checkpoint.reader import shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.options.training import PretrainOptions

FLAG = "--pretrained-checkpoint"


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A checkpoint that fits the run which starts from its weights.

    The shape is the checkpoint's: its position table may be longer than the run's samples.
    """

    checkpoint: CheckpointRecord
    shape: ModelShape

    def inputs(self) -> dict[str, str]:
        """What the run's provenance says of it."""
        return {"pretrained checkpoint": self.checkpoint.hash}


def find_pretrained(
    options: PretrainOptions, size: ModelSize, data: TokenData
) -> Pretrained | None:
    """What --pretrained-checkpoint names, if it is given.

    Args:
        options: of the run that starts.
        size: what --model-size names.
        data: what the run is trained on.

    Raises:
        UserError: if it is no whole checkpoint, or of another size, tokenizer or vocabulary than
            the run, or made for shorter samples.
    """
    path = options.pretrained_checkpoint
    if path is None:
        return None
    checkpoint = CheckpointRecord.load(find_checkpoint(path, FLAG))
    shape = shape_of(checkpoint)
    _require_size(checkpoint.root, shape.size, size, options.model_size)
    _require_tokens(checkpoint, shape, data)
    longest = shape.max_sequence_length
    if options.seq_length > longest:
        raise UserError(
            f"--seq-length {options.seq_length} is longer than the {longest} positions that "
            f"{checkpoint.root} was trained with ({FLAG}); give {longest} or fewer"
        )
    return Pretrained(checkpoint, shape)


def _require_size(where: Path, found: ModelSize, wanted: ModelSize, name: str) -> None:
    for field in dataclasses.fields(ModelSize):
        has, asked = getattr(found, field.name), getattr(wanted, field.name)
        if has != asked:
            raise UserError(
                f"{where} has {field.name} {has}, --model-size {name} asks for {asked}; "
                f"give the size that it was trained with, or another {FLAG}"
            )


def _require_tokens(checkpoint: CheckpointRecord, shape: ModelShape, data: TokenData) -> None:
    where, tokenizer = checkpoint.root, data.tokenizer
    if checkpoint.tokenizer_hash != tokenizer.sha256:
        raise UserError(
            f"{where} was trained with another tokenizer than {data.where} was made with; "
            f"preprocess the text with that tokenizer (--tokenizer-model), or give another {FLAG}"
        )
    if shape.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"{where} has a vocabulary of {shape.vocab_size}, {data.where} one of "
            f"{tokenizer.vocab_size}; give another {FLAG}"
        )
