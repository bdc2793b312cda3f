"""Convert checkpoints from and to Hugging Face folders, and from Megatron-LM's checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megatron_chameleon.artifacts import provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.artifacts.files import finish_replacements, sha256_of_files, writing
from megatron_chameleon.checkpoint.huggingface import HuggingFaceWeights, write_folder
from megatron_chameleon.checkpoint.load import (
    config_of,
    find_tokenizer,
    load_weights,
    open_checkpoint,
    open_reader,
    recorded_tokenizer,
)
from megatron_chameleon.checkpoint.options import (
    FromHuggingFaceOptions,
    FromMegatronOptions,
    HuggingFaceFormat,
    ToHuggingFaceOptions,
)
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state
from megatron_chameleon.corpus.tokenizer import Tokenizer, load_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.huggingface import to_huggingface
from megatron_chameleon.model.huggingface_config import CONFIG_NAME, config_fields, describe
from megatron_chameleon.parallel.layout import Layout, distributed
from megatron_chameleon.parallel.options import ParallelOptions

STARTED_FROM = "Hugging Face folder"
"""Name of the provenance input that holds the hash of a converted checkpoint's weights."""


def convert_to_huggingface(options: ToHuggingFaceOptions) -> None:
    """Write the weights, config and tokenizer of a checkpoint as a Hugging Face folder.

    Raises:
        UserError: for invalid options or inputs, or weights that ``--dtype`` cannot represent. In
            these cases nothing is written.
    """
    output = Path(os.path.abspath(options.output))
    check_output(output, CONFIG_NAME, overwrite=options.overwrite)
    record = open_checkpoint(options.checkpoint, tokenizer=options)
    tokenizer = find_tokenizer(options, record)
    write_huggingface(record, tokenizer, output, options)
    kind = tokenizer.file.kind
    print(
        f"{describe(config_of(record))}, step {record.step} of {record.root}\n"
        f"written to {options.output} in {options.dtype}, with its {tokenizer.file.name}"
        f"{'' if kind == 'tokenizers' else f' (for the {kind} package, not for AutoTokenizer)'}\n"
        f"next: transformers.AutoModelForCausalLM.from_pretrained('{options.output}')"
    )


def write_huggingface(
    record: CheckpointRecord,
    tokenizer: Tokenizer,
    output: Path,
    options: HuggingFaceFormat,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint's weights, config, tokenizer and provenance as a Hugging Face folder.

    Args:
        record: the checkpoint.
        tokenizer: tokenizer of the checkpoint.
        output: the folder, which is replaced if it exists.
        options: format of the weights; all options are recorded in the provenance.
        write_more: writes further files to the temporary folder that becomes ``output``.

    Raises:
        UserError: for a vocabulary smaller than the tokenizer's, for weights that the data type
            cannot represent, or if the folder cannot be written. In these cases nothing is written.
    """
    config = config_of(record)
    _check_vocabulary(tokenizer, config, f"{record.root}/{CheckpointRecord.FILE_NAME}")
    dtype = getattr(torch, options.dtype)
    body = config_fields(config, options.dtype, tokenizer.eod_id)
    with _one_rank() as layout:
        reader = open_reader(record, layout)
        tensors = to_huggingface(dict(reader.model.named_parameters()), config)
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
            body,
            tensors,
            tokenizer,
            provenance(options, {"checkpoint": record.hash}).portable(),
            options.max_shard_size,
            write_more,
        )


def convert_from_huggingface(options: FromHuggingFaceOptions) -> None:
    """Convert a Hugging Face folder to a checkpoint of step 0 that every tool reads.

    Raises:
        UserError: for invalid options or inputs. In these cases nothing is written.
    """
    output = Path(os.path.abspath(options.output))
    check_output(output, CheckpointRecord.FILE_NAME, overwrite=options.overwrite)
    found = HuggingFaceWeights.find(options.model, allow_pickle=options.allow_pickle)
    tokenizer_path = options.tokenizer_model or options.model
    tokenizer = load_tokenizer(tokenizer_path, options.eod_token, options.tiktoken_pattern)
    _check_vocabulary(tokenizer, found.config, str(found.config_file))
    weights = dataclasses.replace(found, vocab_size=tokenizer.vocab_size)
    options = dataclasses.replace(options, eod_token=tokenizer.eod_token)
    with _one_rank() as layout:
        model = build_model(weights.config, layout, seed=0)
        weights.load([model])
        record = CheckpointRecord(
            root=output,
            model=dataclasses.asdict(weights.config),
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
        f"{describe(weights.config)}, from {options.model}\n"
        f"written to {options.output}, a checkpoint of step 0\n"
        "next: preprocess a corpus for it with megatron-chameleon preprocess_data "
        f"--tokenizer-model {tokenizer_path}",
        sep="\n",
    )


def convert_from_megatron(options: FromMegatronOptions) -> None:
    """Convert a Megatron-LM checkpoint to a checkpoint of weights alone, with its tokenizer's path.

    Raises:
        UserError: for invalid options or inputs. In these cases nothing is written.
    """
    output = Path(os.path.abspath(options.output))
    check_output(output, CheckpointRecord.FILE_NAME, overwrite=options.overwrite)
    found = open_checkpoint(options.checkpoint, tokenizer=options)
    with _one_rank() as layout:
        model = build_model(config_of(found), layout, seed=0)
        load_weights(found, [model])
        used = dataclasses.replace(options, tokenizer_model=recorded_tokenizer(found))
        record = dataclasses.replace(
            found,
            root=output,
            layout=layout.describe(),
            files={},
            provenance=provenance(used, {"Megatron-LM checkpoint": found.hash}),
        )
        save_checkpoint(model_state([model]), record)
    print(
        f"{describe(config_of(found))}, step {found.step} of {found.root}\n"
        f"written to {options.output}, without the state of the optimizer\n"
        f"next: torchrun -m megatron_chameleon compute_mixture --checkpoint {options.output} ..."
    )


def check_output(folder: Path, marker: str, *, overwrite: bool) -> None:
    """Check that ``folder`` may be written.

    Args:
        folder: the folder to write.
        marker: name of a file that identifies the folders which may be replaced.
        overwrite: whether an existing folder with ``marker`` may be replaced.

    Raises:
        UserError: if the folder may not be written; the message names the existing content.
    """
    with writing(folder):
        finish_replacements(folder.parent, glob.escape(folder.name))
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir() or folder.is_symlink():
        raise UserError(f"--output {folder} is not a folder; choose a new folder")
    if (folder / marker).is_file():
        if not overwrite:
            raise UserError(
                f"--output {folder} already holds a {marker}; choose another folder, or pass "
                "--overwrite to replace the whole folder"
            )
    elif any(folder.iterdir()):
        raise UserError(
            f"--output {folder} holds other files and no {marker}; choose a new folder, since the "
            "whole folder would be replaced"
        )


def _check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, where: str) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{where}: the model has {config.vocab_size} embeddings, but {tokenizer.path} has ids "
            f"up to {tokenizer.vocab_size - 1}; pass the model's own tokenizer with "
            "--tokenizer-model"
        )


@contextlib.contextmanager
def _one_rank() -> Iterator[Layout]:
    with distributed(ParallelOptions(), seed=0) as layout:
        if layout.world_size > 1:
            raise UserError(
                "a checkpoint of any layout is converted on one rank; start the command without "
                "torchrun"
            )
        yield layout
