"""Convert checkpoints to Hugging Face GPT-2 folders and back, on one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_chameleon.artifacts import Corpus, find_checkpoint, provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.huggingface_folder import (
    CONFIG_NAME,
    HuggingFaceWeights,
    check_output,
    write_folder,
)
from megatron_chameleon.checkpoint.load import open_reader, shape_of
from megatron_chameleon.checkpoint.options import (
    FromHuggingFaceOptions,
    ToHuggingFaceOptions,
    TokenizerChoice,
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
from megatron_chameleon.model.huggingface import config_of_shape, to_huggingface
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.parallel.layout import Layout, distributed
from megatron_chameleon.parallel.options import ParallelOptions

STARTED_FROM = "Hugging Face folder"
"""Name of the input in a converted checkpoint's provenance that holds the hash of its weights."""

DEFAULT_EOD_TOKEN = "<|endoftext|>"


def convert_to_huggingface(options: ToHuggingFaceOptions) -> None:
    """Write the weights, shape and tokenizer of a checkpoint as a GPT-2 folder.

    Raises:
        UserError: for invalid options or inputs, or weights that ``--dtype`` cannot represent.
            Nothing is then written.
    """
    output = Path(os.path.abspath(options.output))
    check_output(output, CONFIG_NAME, overwrite=options.overwrite)
    record = CheckpointRecord.load(find_checkpoint(options.checkpoint))
    shape = shape_of(record)
    tokenizer = find_tokenizer(options, record)
    _check_vocabulary(tokenizer, shape, f"{record.root}/{CheckpointRecord.FILE_NAME}")
    dtype = getattr(torch, options.dtype)
    with _one_rank() as layout:
        reader = open_reader(record, layout)
        tensors = to_huggingface(dict(reader.model.named_parameters()), shape)
        for name, tensor in tensors.items():
            tensors[name] = tensor.to("cpu", dtype)
            if not torch.isfinite(tensors[name]).all():
                raise UserError(
                    f"{record.root}: tensor {name} has values that are not finite in {dtype}; pass "
                    "--dtype float32 or bfloat16, or an earlier checkpoint if the model has "
                    "diverged"
                )
        write_folder(
            output,
            config_of_shape(shape, dtype, tokenizer.eod_id),
            tensors,
            tokenizer,
            provenance(options, {"checkpoint": record.hash}),
            options.max_shard_size,
        )
    kind = tokenizer.file.kind
    print(
        f"{_describe(shape)}, step {record.step} of {record.root}\n"
        f"written to {options.output} in {options.dtype}, with its {tokenizer.file.name}"
        f"{'' if kind == 'tokenizers' else f' (not for AutoTokenizer, but the {kind} package)'}\n"
        f"next: transformers.AutoModelForCausalLM.from_pretrained('{options.output}')"
    )


def convert_from_huggingface(options: FromHuggingFaceOptions) -> None:
    """Write a GPT-2 folder as a checkpoint of step 0 that every tool reads.

    Raises:
        UserError: for invalid options or inputs. Nothing is then written.
    """
    output = Path(os.path.abspath(options.output))
    check_output(output, CheckpointRecord.FILE_NAME, overwrite=options.overwrite)
    found = HuggingFaceWeights.find(options.model, allow_pickle=options.allow_pickle)
    tokenizer_path = options.tokenizer_model or options.model
    tokenizer = load_tokenizer(tokenizer_path, options.eod_token, options.tiktoken_pattern)
    _check_vocabulary(tokenizer, found.shape, str(found.config_file))
    weights = dataclasses.replace(found, vocab_size=tokenizer.vocab_size)
    with _one_rank() as layout:
        model = build_model(weights.shape, layout, seed=0)
        weights.load([model])
        record = CheckpointRecord(
            root=output,
            model=dataclasses.asdict(weights.shape),
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
        f"{_describe(weights.shape)}, from {options.model}\n"
        f"written to {options.output}, a checkpoint of step 0\n"
        f"next: preprocess a corpus for it with tools/preprocess_data.py --tokenizer-model "
        f"{tokenizer_path}",
        sep="\n",
    )


def find_tokenizer(options: TokenizerChoice, record: CheckpointRecord) -> Tokenizer:
    """Open the tokenizer of the checkpoint's training data.

    Its location is taken from ``options``, or from the options recorded in the checkpoint: those of
    a run with --corpus or --data-path, or of a conversion.

    Raises:
        UserError: if it cannot be found, or is not the one the checkpoint was trained with.
    """
    path = options.tokenizer_model or recorded_tokenizer(record)
    if path is None or not (options.tokenizer_model or path.exists()):
        problem = f"is no longer at {path}" if path else "is not recorded"
        raise UserError(
            f"the tokenizer of {record.root} {problem}; pass it, or the corpus that was made with "
            "it, with --tokenizer-model"
        )
    if Corpus.exists(path):
        options.reject_changed(("tiktoken_pattern", "eod_token"), f"the corpus {path} records it")
        tokenizer = corpus_tokenizer(Corpus.load(path))
    else:
        recorded = record.provenance.options
        if not recorded.get("corpus"):  # a run on --data-path records its options under "data"
            recorded = recorded.get("data") or recorded
        eod_token = options.eod_token or recorded.get("eod_token")
        if eod_token is None:
            eod_token = DEFAULT_EOD_TOKEN
            warnings.warn(
                f"{record.root} does not record its end-of-document token: assuming {eod_token}; "
                "pass --eod-token, or the corpus with --tokenizer-model",
                stacklevel=2,
            )
        pattern = options.tiktoken_pattern or recorded.get("tiktoken_pattern")
        tokenizer = load_tokenizer(path, eod_token, pattern)
    if tokenizer.sha256 != record.tokenizer_hash:
        raise UserError(
            f"{tokenizer.path} is not the tokenizer that {record.root} was trained with (its hash "
            "differs); pass that one, or the corpus that was made with it, with --tokenizer-model"
        )
    return tokenizer


def recorded_tokenizer(record: CheckpointRecord) -> Path | None:
    """Return the recorded path of the tokenizer, or of a corpus or model folder that holds it.

    A relative path is resolved from the run's working folder, else from the current one.
    """
    options = record.provenance.options
    data = options.get("data") or options
    place = options.get("corpus") or data.get("tokenizer_model") or options.get("model")
    if not place:
        return None
    from_start = Path(record.provenance.working_folder or ".") / place
    return Path(place) if Path(place).exists() and not from_start.exists() else from_start


def _check_vocabulary(tokenizer: Tokenizer, shape: ModelShape, where: str) -> None:
    if tokenizer.vocab_size > shape.vocab_size:
        raise UserError(
            f"{where}: the model has {shape.vocab_size} embeddings, but {tokenizer.path} has ids "
            f"up to {tokenizer.vocab_size - 1}; pass the model's own tokenizer with "
            "--tokenizer-model"
        )


@contextlib.contextmanager
def _one_rank() -> Iterator[Layout]:
    with distributed(ParallelOptions(), seed=0) as layout:
        if layout.world_size > 1:
            raise UserError(
                "tools/convert_checkpoint.py runs on one rank, whatever layout wrote the "
                "checkpoint; start it with python, not with torchrun"
            )
        yield layout


def _describe(shape: ModelShape) -> str:
    return (
        f"GPT-2 of {shape.size.num_layers} layers, {shape.num_parameters:,} parameters, "
        f"vocabulary {shape.vocab_size}, {shape.max_sequence_length} positions, {shape.activation}"
    )
