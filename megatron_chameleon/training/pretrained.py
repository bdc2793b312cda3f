"""Trained weights that a new run starts from, instead of random ones."""

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
    """Trained weights that fit the run which starts from them.

    Attributes:
        where: they lie.
        source: what is read: a checkpoint, or what is taken of a Hugging Face folder.
        shape: of the run's model. Its position table may be longer than the run's samples.
        hash: hex SHA-256 of the weights, wherever they lie.
    """

    where: Path
    source: CheckpointRecord | HuggingFaceWeights
    shape: ModelShape
    hash: str

    def inputs(self) -> dict[str, str]:
        """What the run's provenance says of it."""
        return {"pretrained checkpoint": self.hash}

    def load(self, model: Sequence[torch.nn.Module]) -> None:
        """Read the weights into ``model``, this rank's chunks."""
        if isinstance(self.source, HuggingFaceWeights):
            self.source.load(model)
        else:
            load_weights(self.source, model)

    @property
    def lines(self) -> list[str]:
        """What a run says that starts from it."""
        is_folder = isinstance(self.source, HuggingFaceWeights)
        more = self.source.left_out if isinstance(self.source, HuggingFaceWeights) else []
        what = "the Hugging Face folder " if is_folder else ""
        return [f"starting from the weights of {what}{self.where}", *more]


def find_pretrained(options: PretrainOptions, data: TokenData) -> Pretrained | None:
    """What --pretrained-checkpoint names, if it is given.

    Args:
        options: of the run that starts.
        data: what the run is trained on.

    Raises:
        UserError: if it is no whole checkpoint and no GPT-2 folder, of another size than
            --model-size asks for, of another tokenizer or too small a vocabulary, or made for
            shorter samples.
    """
    path = options.pretrained_checkpoint
    if path is None:
        return None
    found = _of_folder(path, options, data) if _is_folder(path) else _of_checkpoint(path, data)
    if options.model_size is not None:
        _require_size(found, model_size(options.model_size), options.model_size)
    longest = found.shape.max_sequence_length
    if options.seq_length > longest:
        raise UserError(
            f"--seq-length {options.seq_length} is longer than the {longest} positions that "
            f"{found.where} was trained with ({FLAG}); give {longest} or fewer"
        )
    if isinstance(found.source, HuggingFaceWeights):
        found.source.read()  # refuses tensors that do not fit, before anything is written
    return found


def _is_folder(path: Path) -> bool:
    return not (path / CheckpointRecord.FILE_NAME).is_file() and is_huggingface_folder(path)


def _of_checkpoint(path: Path, data: TokenData) -> Pretrained:
    checkpoint = CheckpointRecord.load(find_checkpoint(path, FLAG))
    shape, where = shape_of(checkpoint), checkpoint.root
    if checkpoint.tokenizer_hash != data.tokenizer.sha256:
        raise UserError(
            f"{where} was trained with another tokenizer than {data.where} was made with; "
            f"preprocess the text with that tokenizer (--tokenizer-model), or give another {FLAG}"
        )
    if shape.vocab_size != data.tokenizer.vocab_size:
        raise UserError(
            f"{where} has a vocabulary of {shape.vocab_size}, {data.where} one of "
            f"{data.tokenizer.vocab_size}; give another {FLAG}"
        )
    return Pretrained(where, checkpoint, shape, checkpoint.hash)


def _of_folder(path: Path, options: PretrainOptions, data: TokenData) -> Pretrained:
    weights = HuggingFaceWeights.find(path)
    wanted, rows = data.tokenizer.vocab_size, weights.config.vocab_size
    if rows < wanted:
        raise UserError(
            f"{weights.config_file}: a vocabulary of {rows} is too small for {data.where}, whose "
            f"tokenizer has {wanted} tokens; preprocess the text with the model's own tokenizer "
            f"(--tokenizer-model), or give another {FLAG}"
        )
    check_tokenizer(path, options, data)
    weights = dataclasses.replace(weights, vocab_size=wanted)
    return Pretrained(path, weights, weights.shape, weights.hash())


def _require_size(found: Pretrained, wanted: ModelSize, name: str) -> None:
    for field in dataclasses.fields(ModelSize):
        has, asked = getattr(found.shape.size, field.name), getattr(wanted, field.name)
        if has != asked:
            raise UserError(
                f"{found.where} has {field.name} {has}, --model-size {name} asks for {asked}; "
                f"leave --model-size out, which takes the size from there, or give another {FLAG}"
            )


def check_tokenizer(folder: Path, options: PretrainOptions, data: TokenData) -> None:
    """Refuse a corpus whose ids stand for other tokens than those of the model in ``folder``.

    The same vocabulary comes in files of many forms, and with tokens added to it; so files that
    differ are compared token by token. A folder without a tokenizer says nothing of its ids, and
    is taken at the user's word.

    Raises:
        UserError: saying what to do.
    """
    path = folder / "tokenizer.json"
    found = path if path.is_file() else vocab_file_in(folder)
    if found is None:
        return
    model = recorded_tokenizer_file(found, data.tokenizer)
    if model.sha256 == data.tokenizer.sha256:
        return
    corpus = _tokenizer_of(options, data)
    if corpus is None or not _vocabulary(corpus).items() <= _vocabulary(model).items():
        raise UserError(
            f"{found} gives tokens other ids than the tokenizer that {data.where} was made with; "
            f"preprocess the text with --tokenizer-model {folder}, or give another "
            "--pretrained-checkpoint"
        )


def _tokenizer_of(options: PretrainOptions, data: TokenData) -> TokenizerFile | None:
    """What made the tokens of ``data``, if it lies where it was and says what its ids mean."""
    path = options.data.tokenizer_model or Path(data.where) / data.tokenizer.file
    if data.tokenizer.kind != "tokenizers" or not path.exists():
        return None
    return recorded_tokenizer_file(path, data.tokenizer)


def _vocabulary(file: TokenizerFile) -> dict[str, int]:
    """Token -> id, added tokens included. Raises UserError if the file is damaged."""
    file.open()
    return tokenizers.Tokenizer.from_buffer(file.content).get_vocab()
