"""Start a new run from trained weights: a run, a checkpoint or a Hugging Face model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.artifacts.record import differences
from megatron_chameleon.checkpoint.open_model import Model, open_model
from megatron_chameleon.corpus.domains import Domains
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.options import resolve_model
from megatron_chameleon.training.options import PretrainOptions

FLAG = "--pretrained-checkpoint"


def open_pretrained(options: PretrainOptions, data: Domains) -> tuple[Model, ModelConfig] | None:
    """Open and check the model of ``--pretrained-checkpoint``; None without this option.

    Args:
        options: options of the new run.
        data: its training data.

    Returns:
        The model, and the config of the run: with rotary positions, its sequence length is at least
        that of the run's samples.

    Raises:
        UserError: if there is no such model, or if it is not --model, its tokenizer differs, its
            vocabulary is too small, or it has fewer positions than --seq-length.
    """
    path = options.pretrained_checkpoint
    if path is None:
        return None
    own = options.data.tokenizer_model or Path(data.where) / data.tokenizer.file
    model = open_model(path, FLAG).for_tokens(data.tokenizer, own, data.where)
    model.check_weights()  # before anything is written
    config, where = model.config, model.where
    if options.model is not None:
        sizes = config.vocab_size, config.max_sequence_length
        expected = resolve_model(options.model, options.architecture, *sizes)
        if config != expected:
            different = differences(config, expected)
            fields = ", ".join(
                f"{name} {is_}, not {not_}" for name, (is_, not_) in different.items()
            )
            raise UserError(
                f"--model {options.model}: {where} has {fields}; leave out --model and the "
                "flags of its architecture to use the model of the weights"
            )
    longest = config.max_positions
    if options.seq_length > longest:
        raise UserError(
            f"--seq-length {options.seq_length}: {where} ({FLAG}) has {longest} positions; "
            f"pass at most {longest}"
        )
    if options.seq_length > config.max_sequence_length:  # only with rotary positions
        config = dataclasses.replace(config, max_sequence_length=options.seq_length)
    return model, config
