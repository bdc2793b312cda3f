"""Checkpoints to Hugging Face GPT-2 folders and back, on one rank."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from megatron_chameleon.artifacts import Corpus, find_checkpoint, provenance
from megatron_chameleon.artifacts.checkpoint import FILE_NAME, CheckpointRecord
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.huggingface_folder import (
    CONFIG_NAME,
    check_output,
    write_folder,
)
from megatron_chameleon.checkpoint.huggingface_weights import HuggingFaceWeights
from megatron_chameleon.checkpoint.reader import open_reader, shape_of
from megatron_chameleon.checkpoint.recorded_tokenizer import (
    DEFAULT_EOD_TOKEN,
    RecordedTokenizer,
)
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state
from megatron_chameleon.corpus.tokenizer import (
    Tokenizer,
    corpus_tokenizer,
    load_tokenizer,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.huggingface import Tensors, config_of_shape, to_huggingface
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.convert import FromHuggingFaceOptions, ToHuggingFaceOptions
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.options.tokenizer import TokenizerChoice
from megatron_chameleon.parallel.layout import Layout, distributed

STARTED_FROM = "Hugging Face folder"
"""The input in the provenance of a converted checkpoint that has its weights."""

TokenizerOptions = ToHuggingFaceOptions | TokenizerChoice
"""What a tool is told of the tokenizer of a checkpoint."""


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
    found = HuggingFaceWeights.find(options.model, allow_pickle=options.allow_pickle)
    tokenizer_path = options.tokenizer_model or options.model
    tokenizer = load_tokenizer(tokenizer_path, options.eod_token, options.tiktoken_pattern)
    _check_vocabulary(tokenizer, found.shape, str(found.config_file))
    weights = dataclasses.replace(found, vocab_size=tokenizer.vocab_size)
    shape = weights.shape
    with distributed(ParallelOptions(), seed=0) as layout:
        _require_one_rank(layout)
        model = build_model(shape, layout, seed=0)
        weights.load([model])
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
            provenance=provenance(options, {STARTED_FROM: sha256_of_files(*weights.files)}),
        )
        save_checkpoint(model_state([model]), record)
    print(
        *weights.left_out,
        f"{_describe(shape)}, from {options.model}\n"
        f"written to {options.output}, a checkpoint of step 0; a corpus for it is made by "
        f"tools/preprocess_data.py --tokenizer-model {tokenizer_path}",
        sep="\n",
    )


def find_tokenizer(options: TokenizerOptions, record: CheckpointRecord) -> Tokenizer:
    """The tokenizer that made what the model of ``record`` was trained on.

    Raises:
        UserError: if it cannot be found, or what is given is another one.
    """
    recorded = RecordedTokenizer.of(record)
    path = options.tokenizer_model or _found(recorded, record)
    if Corpus.exists(path):
        _refuse_what_a_corpus_says(options, path)
        tokenizer = corpus_tokenizer(Corpus.load(path))
    else:
        eod_token = options.eod_token or _recorded_end(recorded, record)
        pattern = options.tiktoken_pattern or recorded.tiktoken_pattern
        tokenizer = load_tokenizer(path, eod_token, pattern)
    if tokenizer.sha256 != record.tokenizer_hash:
        raise UserError(
            f"{tokenizer.path} is not the tokenizer that {record.root} was trained with (its hash "
            "differs); give that one, or the corpus that was made with it, by --tokenizer-model"
        )
    return tokenizer


def _found(recorded: RecordedTokenizer, record: CheckpointRecord) -> Path:
    """Where the tokenizer lies. Raises UserError if that is not known, or nothing is there."""
    if recorded.place is not None and recorded.place.exists():
        return recorded.place
    known = "is not recorded" if recorded.place is None else f"is no longer at {recorded.place}"
    raise UserError(
        f"the tokenizer of {record.root} {known}; give it, or the corpus that was made with it, by "
        "--tokenizer-model"
    )


def _recorded_end(recorded: RecordedTokenizer, record: CheckpointRecord) -> str:
    """The end-of-document token; told where it is taken for granted."""
    if recorded.eod_token is None and recorded.place is not None:
        warnings.warn(
            f"{record.root} does not say what ended documents in its corpus: {DEFAULT_EOD_TOKEN} "
            "is taken; give --eod-token, or the corpus by --tokenizer-model",
            stacklevel=2,
        )
    return recorded.eod_token or DEFAULT_EOD_TOKEN


def _refuse_what_a_corpus_says(options: TokenizerOptions, corpus: Path) -> None:
    given = {"--tiktoken-pattern": options.tiktoken_pattern, "--eod-token": options.eod_token}
    for flag, value in given.items():
        if value is not None:
            raise UserError(
                f"{flag} {value}: the corpus {corpus} says it itself; leave the option out, or "
                "give a tokenizer's file by --tokenizer-model"
            )


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
        if float(size.strip()[:-2]) <= 0:  # before the unit
            raise ValueError("it is not above 0")
    except (ValueError, OverflowError) as error:
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
