"""Convert checkpoints from and to Hugging Face folders, and from Megatron-LM's checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_chameleon.artifacts import provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.artifacts.files import finish_replacements, sha256_of_files, writing
from megatron_chameleon.checkpoint.huggingface import write_folder
from megatron_chameleon.checkpoint.open_model import (
    CheckpointModel,
    HuggingFaceModel,
    Model,
    open_model,
)
from megatron_chameleon.checkpoint.options import (
    FromHuggingFaceOptions,
    FromMegatronOptions,
    HuggingFaceFormat,
    ToHuggingFaceOptions,
)
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state
from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.huggingface_config import CONFIG_NAME, config_fields, describe
from megatron_chameleon.model.huggingface_tensors import to_huggingface
from megatron_chameleon.parallel.layout import Layout, distributed
from megatron_chameleon.parallel.options import ParallelOptions


def convert_to_huggingface(options: ToHuggingFaceOptions) -> None:
    """Write the weights, config and tokenizer of a model as a Hugging Face folder.

    Raises:
        UserError: for invalid options or inputs, or weights that ``--dtype`` cannot represent. In
            these cases nothing is written.
    """
    output = Path(os.path.abspath(options.output))
    check_output(output, CONFIG_NAME, overwrite=options.overwrite)
    model, tokenizer = open_model(options.checkpoint, tokenizer=options).with_own_vocabulary()
    write_huggingface(model, tokenizer, output, options)
    kind = tokenizer.file.kind
    print(
        f"{describe(model.config)}, step {model.step} of {model.where}\n"
        f"written to {options.output} in {options.dtype}, with its {tokenizer.file.name}"
        f"{'' if kind == 'tokenizers' else f' (for the {kind} package, not for AutoTokenizer)'}\n"
        f"next: transformers.AutoModelForCausalLM.from_pretrained('{options.output}')"
    )


def write_huggingface(
    model: Model,
    tokenizer: Tokenizer,
    output: Path,
    options: HuggingFaceFormat,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write a model's weights, config, tokenizer and provenance as a Hugging Face folder.

    Args:
        model: the model, with the vocabulary of ``tokenizer``.
        tokenizer: tokenizer of the model.
        output: the folder, which is replaced if it exists.
        options: format of the weights; all options are recorded in the provenance.
        write_more: writes further files to the temporary folder that becomes ``output``.

    Raises:
        UserError: for weights that the data type cannot represent, or if the folder cannot be
            written. In these cases nothing is written.
    """
    config, dtype = model.config, getattr(torch, options.dtype)
    body = config_fields(config, options.dtype, tokenizer.eod_id)
    with _one_rank() as layout:
        reader = model.reader(layout)
        tensors = to_huggingface(dict(reader.model.named_parameters()), config)
        for name, tensor in tensors.items():
            tensors[name] = tensor.to("cpu", dtype)
            if not torch.isfinite(tensors[name]).all():
                raise UserError(
                    f"{model.where}: tensor {name} has values that are not finite in {dtype}; pass "
                    "--dtype float32 or bfloat16, or an earlier checkpoint if the model has "
                    "diverged"
                )
        write_folder(
            output,
            body,
            tensors,
            tokenizer,
            provenance(options, {"checkpoint": model.hash}).portable(),
            options.max_shard_size,
            write_more,
        )


def convert_to_checkpoint(options: FromHuggingFaceOptions | FromMegatronOptions) -> None:
    """Write the weights of a model as a checkpoint, without the state of a training.

    Raises:
        UserError: for invalid options or inputs. In these cases nothing is written.
    """
    output = Path(os.path.abspath(options.output))
    check_output(output, CheckpointRecord.FILE_NAME, overwrite=options.overwrite)
    model: Model
    if isinstance(options, FromHuggingFaceOptions):
        model = open_model(options.model, "--model", options, allow_pickle=options.allow_pickle)
    else:
        model = open_model(options.checkpoint, tokenizer=options)
    if isinstance(model, HuggingFaceModel):
        model, tokenizer = model.with_own_vocabulary()
        record = _initial_record(model, tokenizer)
        used = dataclasses.replace(model.tokenizer_choice, eod_token=tokenizer.eod_token)
        inputs = {"Hugging Face folder": sha256_of_files(*model.files)}
    else:
        assert isinstance(model, CheckpointModel)
        record = dataclasses.replace(model.record, guard={}, hook=None, best=None)
        is_ours = (model.where / CheckpointRecord.FILE_NAME).is_file()
        inputs = {"checkpoint" if is_ours else "Megatron-LM checkpoint": model.hash}
        used = model.tokenizer_choice
    made_by = provenance(dataclasses.replace(options, **vars(used)), inputs)
    with _one_rank() as layout:
        chunks = [build_model(model.config, layout, seed=0)]
        model.load(chunks)
        changes: dict[str, Any] = {"layout": layout.describe(), "files": {}, "provenance": made_by}
        record = dataclasses.replace(record, root=output, **changes)
        save_checkpoint(model_state(chunks), record)
    print(
        *model.left_out,
        f"{describe(model.config)}, step {model.step} of {model.where}",
        f"written to {options.output}, without the state of an optimizer",
        f"next: pass it as --checkpoint, with a corpus of the tokenizer {used.tokenizer_model}",
        sep="\n",
    )


def _initial_record(model: HuggingFaceModel, tokenizer: Tokenizer) -> CheckpointRecord:
    """Return the record of a checkpoint of step 0."""
    return CheckpointRecord(
        root=model.where,
        model=dataclasses.asdict(model.config),
        step=0,
        samples=0,
        domain_samples={},
        mixture_phases=[],
        domain_tokens={},
        tokenizer_hash=tokenizer.sha256,
        corpus_hash="",
        mixture_hash="",
        layout={},
        files={},
        provenance=provenance(model.choice, {}),
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


@contextlib.contextmanager
def _one_rank() -> Iterator[Layout]:
    with distributed(ParallelOptions(), seed=0) as layout:
        if layout.world_size > 1:
            raise UserError(
                "a checkpoint of any layout is converted on one rank; start the command without "
                "torchrun"
            )
        yield layout
