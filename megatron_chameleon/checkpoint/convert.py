"""Checkpoints to Hugging Face GPT-2 folders and back, on one rank."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from megatron_chameleon.artifacts import Corpus, find_checkpoint, provenance
from megatron_chameleon.artifacts.checkpoint import FILE_NAME, CheckpointRecord
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.huggingface_folder import (
    CONFIG_NAME,
    check_output,
    find_weights,
    read_json,
    read_tensors,
    write_folder,
)
from megatron_chameleon.checkpoint.reader import open_reader, shape_of
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state
from megatron_chameleon.corpus.tokenization.tokenizer import (
    Tokenizer,
    corpus_tokenizer,
    load_tokenizer,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model, padded_vocab_size
from megatron_chameleon.model.huggingface import (
    Tensors,
    checked_tensors,
    config_of_shape,
    from_huggingface,
    read_config,
    shape_of_config,
    to_huggingface,
)
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.convert import FromHuggingFaceOptions, ToHuggingFaceOptions
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.parallel.layout import Layout, distributed

STARTED_FROM = "Hugging Face folder"
"""The input in the provenance of a converted checkpoint that has its weights."""


def convert_to_huggingface(options: ToHuggingFaceOptions) -> None:
    """Write the weights, the shape and the tokenizer of a checkpoint as a GPT-2 folder.

    Raises:
        UserError: for a mistake in the options or in what they name, or weights that ``--dtype``
            cannot hold. Nothing is then written.
    """
    output = _absolute(options.output)
    check_output(output, CONFIG_NAME, overwrite=options.overwrite)
    _check_shard_size(options.max_shard_size)
    record = CheckpointRecord.load(find_checkpoint(options.checkpoint))
    shape = shape_of(record)
    tokenizer = find_tokenizer(options, record)
    _check_vocabulary(tokenizer, shape, f"{record.root}/{FILE_NAME}")
    dtype = getattr(torch, options.dtype)
    with distributed(ParallelOptions(), seed=0) as layout:
        _require_one_rank(layout)
        reader = open_reader(record, layout)
        tensors = to_huggingface(dict(reader.model.named_parameters()), shape)
        tensors = _in_dtype(tensors, dtype, record.root)
        write_folder(
            output,
            config_of_shape(shape, dtype, tokenizer.eod_id),
            tensors,
            tokenizer,
            provenance(options, {"checkpoint": record.hash}),
            options.max_shard_size,
        )
    print(
        f"{_describe(shape)}, step {record.step} of {record.root}\n"
        f"written to {options.output} in {options.dtype}, {_about_tokenizer(tokenizer)}\n"
        f"next: transformers.AutoModelForCausalLM.from_pretrained('{options.output}')"
    )


def convert_from_huggingface(options: FromHuggingFaceOptions) -> None:
    """Write a GPT-2 folder as a checkpoint of step 0 that every tool reads.

    Raises:
        UserError: for a mistake in the options or in what they name. Nothing is then written.
    """
    output = _absolute(options.output)
    check_output(output, FILE_NAME, overwrite=options.overwrite)
    config = read_config(read_json(options.model / CONFIG_NAME), str(options.model / CONFIG_NAME))
    shape = shape_of_config(config)
    tokenizer_path = options.tokenizer_model or options.model
    tokenizer = load_tokenizer(tokenizer_path, options.eod_token, options.tiktoken_pattern)
    _check_vocabulary(tokenizer, shape, str(options.model / CONFIG_NAME))
    files = find_weights(options.model, allow_pickle=options.allow_pickle)
    tensors = checked_tensors(read_tensors(files), shape, str(options.model))
    with distributed(ParallelOptions(), seed=0) as layout:
        _require_one_rank(layout)
        model = _model_of(tensors, shape, layout)
        record = CheckpointRecord(
            root=output,
            model=dataclasses.asdict(shape),
            step=0,
            samples=0,
            domain_samples={},
            mixture_phases=[],
            domain_tokens={},
            tokenizer_hash=tokenizer.sha256,
            corpus_hash="",
            mixture_hash="",
            layout=layout.describe(),
            files={},
            provenance=provenance(options, {STARTED_FROM: sha256_of_files(*files)}),
        )
        save_checkpoint(model_state([model]), record)
    if config.has_dropout:
        print(f"its dropout of {config.resid_pdrop:g} is left out: models here train without")
    print(
        f"{_describe(shape)}, from {options.model}\n"
        f"written to {options.output}, a checkpoint of step 0; a corpus for it is made by "
        f"tools/preprocess_data.py --tokenizer-model {tokenizer_path}"
    )


def find_tokenizer(options: ToHuggingFaceOptions, record: CheckpointRecord) -> Tokenizer:
    """The tokenizer that made what the model of ``record`` was trained on.

    Raises:
        UserError: if it cannot be found, or what is given is another one.
    """
    path = options.tokenizer_model or _recorded_tokenizer(record)
    if path is None:
        raise UserError(
            f"{record.root} does not say where its tokenizer lies now; give it, or the corpus that "
            "was made with it, by --tokenizer-model"
        )
    if Corpus.exists(path):
        tokenizer = corpus_tokenizer(Corpus.load(path))
    else:
        tokenizer = load_tokenizer(path, options.eod_token, options.tiktoken_pattern)
    if tokenizer.sha256 != record.tokenizer_hash:
        raise UserError(
            f"{tokenizer.path} is not the tokenizer that {record.root} was trained with (its hash "
            "differs); give that one, or the corpus that was made with it, by --tokenizer-model"
        )
    return tokenizer


def _recorded_tokenizer(record: CheckpointRecord) -> Path | None:
    """The first place that has a tokenizer by the options the checkpoint was made with."""
    options: dict[str, Any] = record.provenance.options
    data = options.get("data") or {}
    places = (
        options.get("corpus"),
        options.get("tokenizer_model"),
        data.get("tokenizer_model"),
        options.get("model"),
    )
    return next((Path(place) for place in places if place and Path(place).exists()), None)


def _model_of(tensors: Tensors, shape: ModelShape, layout: Layout) -> torch.nn.Module:
    """A model with these tensors for weights, in float32."""
    model = build_model(shape, layout, seed=0)
    parameters = from_huggingface(tensors, shape, padded_vocab_size(shape.vocab_size, 1))
    own = dict(model.named_parameters())
    assert own.keys() == parameters.keys()
    with torch.no_grad():
        for name, tensor in parameters.items():
            own[name].copy_(tensor)
    return model


def _in_dtype(tensors: Tensors, dtype: torch.dtype, where: Path) -> Tensors:
    """On the CPU and in ``dtype``. Raises UserError for numbers that are not finite there."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"{where}: tensor {name} holds numbers that are not finite: the model has "
                "diverged; convert an earlier checkpoint"
            )
        tensors[name] = tensor.to("cpu", dtype)
        if not torch.isfinite(tensors[name]).all():
            raise UserError(
                f"{where}: tensor {name} has numbers up to {tensor.abs().max():g}, too large for "
                f"{dtype}; give --dtype bfloat16 or float32"
            )
    return tensors


def _check_vocabulary(tokenizer: Tokenizer, shape: ModelShape, where: str) -> None:
    if tokenizer.vocab_size > shape.vocab_size:
        raise UserError(
            f"{where}: a vocabulary of {shape.vocab_size} is too small for {tokenizer.path}, whose "
            f"ids go up to {tokenizer.vocab_size - 1}; give the model's own by --tokenizer-model"
        )


def _check_shard_size(size: str) -> None:
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=size)
    except ValueError as error:
        raise UserError(f"--max-shard-size {size}: {error}; give a size as in 5GB") from error


def _require_one_rank(layout: Layout) -> None:
    if layout.world_size > 1:
        raise UserError(
            "tools/convert_checkpoint.py works on one rank, whatever layout wrote the checkpoint; "
            "start it with python, not with torchrun"
        )


def _absolute(folder: Path) -> Path:
    return Path(os.path.abspath(folder))


def _describe(shape: ModelShape) -> str:
    return (
        f"GPT-2 of {shape.size.num_layers} layers, {shape.num_parameters:,} parameters, "
        f"vocabulary {shape.vocab_size}, {shape.max_sequence_length} positions, {shape.activation}"
    )


def _about_tokenizer(tokenizer: Tokenizer) -> str:
    if tokenizer.file.kind == "tokenizers":
        return "with its tokenizer.json"
    return (
        f"with its {tokenizer.file.name}, which AutoTokenizer does not read: encode with the "
        f"package {tokenizer.file.kind}"
    )
