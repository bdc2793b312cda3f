"""Start a new run from trained weights: a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.artifacts.checkpoint import find_checkpoint
from megatron_chameleon.blend.token_data import TokenData
from megatron_chameleon.checkpoint.huggingface_folder import (
    HuggingFaceWeights,
    is_huggingface_folder,
)
from megatron_chameleon.checkpoint.load import load_weights, shape_of
from megatron_chameleon.corpus.tokenizer import (
    TokenizerFile,
    recorded_tokenizer_file,
    vocab_file_in,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.sizes import ModelShape, ModelSize, model_size
from megatron_chameleon.training.options import PretrainOptions

FLAG = "--pretrained-checkpoint"


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """Initial weights of a run.

    Attributes:
        where: folder of the weights.
        source: a checkpoint, or the weights of a Hugging Face folder.
        shape: shape of the run's model; its position table may be longer than the run's samples.
        hash: hex SHA-256 of the weights.
    """

    where: Path
    source: CheckpointRecord | HuggingFaceWeights
    shape: ModelShape
    hash: str

    @property
    def lines(self) -> list[str]:
        """Description, to print at the start of the run."""
        left_out = self.source.left_out if isinstance(self.source, HuggingFaceWeights) else []
        return [f"initial weights: {self.where}", *left_out]

    def load(self, model: Sequence[torch.nn.Module]) -> None:
        """Load the weights into ``model``, this rank's chunks."""
        if isinstance(self.source, HuggingFaceWeights):
            self.source.load(model)
        else:
            load_weights(self.source, model)


def find_pretrained(options: PretrainOptions, data: TokenData) -> Pretrained | None:
    """Find and check the weights that ``--pretrained-checkpoint`` names; None without it.

    Args:
        options: options of the new run.
        data: its training data.

    Raises:
        UserError: if it is neither a complete checkpoint nor a GPT-2 folder, of another size than
            --model-size, of another tokenizer or a smaller vocabulary, or was trained on shorter
            samples.
    """
    path = options.pretrained_checkpoint
    if path is None:
        return None
    if is_huggingface_folder(path) and not (path / CheckpointRecord.FILE_NAME).is_file():
        found = _from_huggingface(path, options, data)
    else:
        found = _from_checkpoint(path, data)
    if options.model_size is not None:
        expected = model_size(options.model_size)
        for field in dataclasses.fields(ModelSize):
            actual, wanted = (getattr(size, field.name) for size in (found.shape.size, expected))
            if actual != wanted:
                raise UserError(
                    f"{found.where} has {field.name} {actual}, --model-size {options.model_size} "
                    f"has {wanted}; leave --model-size out to use the size of the weights"
                )
    longest = found.shape.max_sequence_length
    if options.seq_length > longest:
        raise UserError(
            f"--seq-length {options.seq_length}: {found.where} ({FLAG}) has {longest} positions; "
            f"pass at most {longest}"
        )
    if isinstance(found.source, HuggingFaceWeights):
        found.source.read()  # rejects tensors that do not fit, before anything is written
    return found


def _from_checkpoint(path: Path, data: TokenData) -> Pretrained:
    checkpoint = CheckpointRecord.load(find_checkpoint(path, FLAG))
    shape, where = shape_of(checkpoint), checkpoint.root
    if checkpoint.tokenizer_hash != data.tokenizer.sha256:
        raise UserError(
            f"{where} was trained with another tokenizer than that of {data.where}; "
            f"preprocess the text with that tokenizer (--tokenizer-model), or pass another {FLAG}"
        )
    if shape.vocab_size != data.tokenizer.vocab_size:
        raise UserError(
            f"{where} has a vocabulary of {shape.vocab_size}, {data.where} one of "
            f"{data.tokenizer.vocab_size}; pass another {FLAG}"
        )
    return Pretrained(where, checkpoint, shape, checkpoint.hash)


def _from_huggingface(path: Path, options: PretrainOptions, data: TokenData) -> Pretrained:
    weights = HuggingFaceWeights.find(path)
    needed, rows = data.tokenizer.vocab_size, weights.config.vocab_size
    if rows < needed:
        raise UserError(
            f"{weights.config_file}: a vocabulary of {rows} is too small for {data.where}, whose "
            f"tokenizer has {needed} tokens; preprocess the text with the model's own tokenizer "
            f"(--tokenizer-model), or pass another {FLAG}"
        )
    check_tokenizer(path, options, data)
    weights = dataclasses.replace(weights, vocab_size=needed)
    return Pretrained(path, weights, weights.shape, weights.hash())


def check_tokenizer(folder: Path, options: PretrainOptions, data: TokenData) -> None:
    """Check that the corpus tokenizer matches the Hugging Face model's.

    The same vocabulary exists in many file formats, and with added tokens; so files that differ
    are compared token by token. A folder without a tokenizer is not checked.

    Raises:
        UserError: if a token has another id.
    """
    path = folder / "tokenizer.json"
    found = path if path.is_file() else vocab_file_in(folder)
    if found is None:
        return
    model = recorded_tokenizer_file(found, data.tokenizer)
    if model.sha256 == data.tokenizer.sha256:
        return
    of_data = options.data.tokenizer_model or Path(data.where) / data.tokenizer.file
    if data.tokenizer.kind == "tokenizers" and of_data.exists():
        expected = _vocabulary(recorded_tokenizer_file(of_data, data.tokenizer))
        if expected.items() <= _vocabulary(model).items():
            return
    raise UserError(
        f"{found} has other token ids than the tokenizer of {data.where}; preprocess the text with "
        f"--tokenizer-model {folder}, or pass another {FLAG}"
    )


def _vocabulary(file: TokenizerFile) -> dict[str, int]:
    """Token -> id, added tokens included. Raises UserError if the file is damaged."""
    file.open()
    return tokenizers.Tokenizer.from_buffer(file.content).get_vocab()
