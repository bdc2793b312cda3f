"""Start a new run from trained weights: a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_chameleon.artifacts.record import differences
from megatron_chameleon.blend.token_data import TokenData
from megatron_chameleon.checkpoint.huggingface import (
    HuggingFaceWeights,
    is_huggingface_folder,
)
from megatron_chameleon.checkpoint.load import config_of, load_weights, open_checkpoint
from megatron_chameleon.corpus.tokenizer import (
    recorded_tokenizer_file,
    same_ids,
    tokenizer_file_in,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.options import resolve_model
from megatron_chameleon.training.options import PretrainOptions

FLAG = "--pretrained-checkpoint"


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """Initial weights of a run.

    Attributes:
        where: folder of the weights.
        config: config of the run's model; its position table may be longer than the run's samples,
            and with rotary positions the sequence length is at least that of the samples.
        hash: hex SHA-256 of the weights.
        load: function that loads the weights into this rank's model chunks.
        left_out: descriptions of weights that are not loaded.
    """

    where: Path
    config: ModelConfig
    hash: str
    load: Callable[[Sequence[torch.nn.Module]], None]
    left_out: Sequence[str] = ()


def find_pretrained(options: PretrainOptions, data: TokenData) -> Pretrained | None:
    """Find and check the weights of ``--pretrained-checkpoint``; None without this option.

    Args:
        options: options of the new run.
        data: its training data.

    Raises:
        UserError: if the path is neither a complete checkpoint nor a Hugging Face folder, or if its
            model is not --model, its tokenizer differs, its vocabulary is too small, or it has
            fewer positions than --seq-length.
    """
    path = options.pretrained_checkpoint
    if path is None:
        return None
    if is_huggingface_folder(path):
        found = _from_huggingface(path, options, data)
    else:
        found = _from_checkpoint(path, data)
    if options.model is not None:
        sizes = found.config.vocab_size, found.config.max_sequence_length
        expected = resolve_model(options.model, options.architecture, *sizes)
        if found.config != expected:
            different = differences(found.config, expected)
            fields = ", ".join(
                f"{name} {is_}, not {not_}" for name, (is_, not_) in different.items()
            )
            raise UserError(
                f"--model {options.model}: {found.where} has {fields}; leave out --model and the "
                "flags of its architecture to use the model of the weights"
            )
    longest = found.config.max_positions
    if options.seq_length > longest:
        raise UserError(
            f"--seq-length {options.seq_length}: {found.where} ({FLAG}) has {longest} positions; "
            f"pass at most {longest}"
        )
    if options.seq_length > found.config.max_sequence_length:  # only with rotary positions
        longer = dataclasses.replace(found.config, max_sequence_length=options.seq_length)
        found = dataclasses.replace(found, config=longer)
    return found


def _from_checkpoint(path: Path, data: TokenData) -> Pretrained:
    checkpoint = open_checkpoint(path, FLAG)
    config, where = config_of(checkpoint), checkpoint.root
    if checkpoint.tokenizer_hash != data.tokenizer.sha256:
        raise UserError(
            f"{where} was trained with another tokenizer than that of {data.where}; preprocess the "
            f"text with the tokenizer of the weights (--tokenizer-model), or pass another {FLAG}"
        )
    if config.vocab_size != data.tokenizer.vocab_size:
        raise UserError(
            f"{where} has a vocabulary of {config.vocab_size} tokens, but the tokenizer of "
            f"{data.where} has {data.tokenizer.vocab_size}; pass another {FLAG}"
        )
    return Pretrained(where, config, checkpoint.hash, functools.partial(load_weights, checkpoint))


def _from_huggingface(path: Path, options: PretrainOptions, data: TokenData) -> Pretrained:
    weights = HuggingFaceWeights.find(path)
    needed, rows = data.tokenizer.vocab_size, weights.found.config.vocab_size
    if rows < needed:
        raise UserError(
            f"{weights.config_file}: a vocabulary of {rows} is too small for {data.where}, whose "
            f"tokenizer has {needed} tokens; preprocess the text with the model's own tokenizer "
            f"(--tokenizer-model), or pass another {FLAG}"
        )
    check_tokenizer(path, options, data)
    weights = dataclasses.replace(weights, vocab_size=needed)
    weights.read()  # raises for missing or unsuitable tensors, before anything is written
    return Pretrained(path, weights.config, weights.hash(), weights.load, weights.left_out)


def check_tokenizer(folder: Path, options: PretrainOptions, data: TokenData) -> None:
    """Check that the corpus tokenizer matches the Hugging Face model's.

    A folder without a tokenizer is not checked.

    Raises:
        UserError: if a token has another id.
    """
    found = tokenizer_file_in(folder)
    if found is None or recorded_tokenizer_file(found, data.tokenizer).sha256 == (
        data.tokenizer.sha256
    ):
        return
    own = options.data.tokenizer_model or Path(data.where) / data.tokenizer.file
    if own.exists() and same_ids(recorded_tokenizer_file(own, data.tokenizer), folder):
        return
    raise UserError(
        f"{found} has other token ids than the tokenizer of {data.where}; preprocess the text with "
        f"--tokenizer-model {folder}, or pass another {FLAG}"
    )
