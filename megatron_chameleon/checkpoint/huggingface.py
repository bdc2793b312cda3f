"""Read and write Hugging Face model folders, and convert them from and to checkpoints.

Weights go through safetensors and huggingface_hub; transformers is not needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_chameleon.artifacts import Provenance, provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.artifacts.files import (
    cannot_write,
    finish_replacements,
    flush_to_disk,
    read_json,
    replace_folder,
    sha256_of_files,
    write_json,
    writing,
)
from megatron_chameleon.checkpoint.load import (
    config_of,
    find_tokenizer,
    open_checkpoint,
    open_reader,
)
from megatron_chameleon.checkpoint.options import FromHuggingFaceOptions, ToHuggingFaceOptions
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state
from megatron_chameleon.corpus.tokenizer import Tokenizer, load_tokenizer
from megatron_chameleon.errors import UserError, first_line
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.model.huggingface import (
    Tensors,
    checked_tensors,
    load_huggingface,
    to_huggingface,
)
from megatron_chameleon.model.huggingface_config import (
    CONFIG_NAME,
    FoundConfig,
    config_fields,
    describe,
    read_model_config,
)
from megatron_chameleon.parallel.layout import Layout, distributed
from megatron_chameleon.parallel.options import ParallelOptions

PROVENANCE_NAME = "provenance.json"
_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_INDEX_SUFFIX = ".index.json"

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
    config = config_of(record)
    tokenizer = find_tokenizer(options, record)
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
            provenance(options, {"checkpoint": record.hash}),
            options.max_shard_size,
        )
    kind = tokenizer.file.kind
    print(
        f"{describe(config)}, step {record.step} of {record.root}\n"
        f"written to {options.output} in {options.dtype}, with its {tokenizer.file.name}"
        f"{'' if kind == 'tokenizers' else f' (for the {kind} package, not for AutoTokenizer)'}\n"
        f"next: transformers.AutoModelForCausalLM.from_pretrained('{options.output}')"
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
        f"next: preprocess a corpus for it with tools/preprocess_data.py --tokenizer-model "
        f"{tokenizer_path}",
        sep="\n",
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
                "tools/convert_checkpoint.py runs on one rank, whatever layout wrote the "
                "checkpoint; start it with python, not with torchrun"
            )
        yield layout


def is_huggingface_folder(folder: Path) -> bool:
    """Return whether ``folder`` holds a transformers model, complete or not."""
    names = (CONFIG_NAME, _SAFETENSORS, _SAFETENSORS + _INDEX_SUFFIX, _PICKLED)
    return any((folder / name).is_file() for name in names)


@dataclasses.dataclass(frozen=True)
class HuggingFaceWeights:
    """Hugging Face model folder, whose tensors stay on disk until :meth:`read` or :meth:`load`.

    Attributes:
        folder: folder of the model.
        files: files that hold the weights.
        found: model that the config.json describes.
        vocab_size: number of embedding rows to read, at most the number in the file: the embeddings
            of public models are padded beyond their tokenizer's vocabulary.
    """

    folder: Path
    files: tuple[Path, ...]
    found: FoundConfig
    vocab_size: int

    @classmethod
    def find(cls, folder: Path, *, allow_pickle: bool = False) -> HuggingFaceWeights:
        """Open ``folder`` without reading its tensors.

        Args:
            folder: folder of the model.
            allow_pickle: accept torch's own format if there is no safetensors file.

        Raises:
            UserError: for an unsupported model, or weights in an unsupported format.
        """
        found = read_model_config(folder)
        files = find_weights(folder, allow_pickle=allow_pickle)
        held = sum(path.stat().st_size for path in files)
        found.config.require_bytes(held, str(folder / CONFIG_NAME))
        return cls(folder, tuple(files), found, found.config.vocab_size)

    @property
    def config_file(self) -> Path:
        """The config.json."""
        return self.folder / CONFIG_NAME

    @property
    def config(self) -> ModelConfig:
        """The model that is read."""
        return dataclasses.replace(self.found.config, vocab_size=self.vocab_size)

    @property
    def left_out(self) -> list[str]:
        """Describe the weights and settings that are not loaded, one line each."""
        rows_in_file, lines = self.found.config.vocab_size, []
        if rows := rows_in_file - self.vocab_size:
            lines.append(
                f"the last {rows} of its {rows_in_file} embedding rows are not loaded: "
                f"the tokenizer has {self.vocab_size} tokens"
            )
        if dropout := self.found.dropout:
            lines.append(f"its dropout of {dropout:g} is not used: models train without dropout")
        return lines

    def hash(self) -> str:
        """Return the hexadecimal SHA-256 of the config and the weight files."""
        return sha256_of_files(self.config_file, *self.files)

    def read(self) -> Tensors:
        """Read the tensors into CPU memory, under their Hugging Face names.

        Raises:
            UserError: if the tensors are damaged, or do not match the config.
        """
        return checked_tensors(read_tensors(self.files), self.found.config, str(self.folder))

    def load(self, model: Sequence[torch.nn.Module]) -> None:
        """Load the weights into ``model``, this rank's chunks; raises like :meth:`read`."""
        tensors = self.read()
        for chunk in model:
            load_huggingface(unwrap(chunk), tensors, self.config)


def read_tensors(files: Sequence[Path]) -> Tensors:
    """Read every tensor in ``files`` into CPU memory.

    Raises:
        UserError: if a file is damaged or holds more than tensors.
    """
    tensors: Tensors = {}
    for path in files:
        try:
            if path.suffix == ".bin":
                found = torch.load(path, map_location="cpu", weights_only=True)
            else:
                found = load_file(path)
        except MemoryError:
            raise
        # A damaged file makes torch's unpickler raise almost any error, from KeyError to
        # struct.error.
        except Exception as error:
            raise UserError(
                f"cannot read {path} ({first_line(error)}): it is damaged; download it again"
            ) from error
        if not isinstance(found, dict) or not all(
            isinstance(tensor, torch.Tensor) for tensor in found.values()
        ):
            raise UserError(f"{path} holds more than named tensors; pass a model's weights")
        tensors |= found
    return tensors


def find_weights(folder: Path, *, allow_pickle: bool) -> list[Path]:
    """Find the weight files in ``folder``: a single file, or the shards that an index lists.

    Raises:
        UserError: if a file is missing, or the weights are pickled and ``allow_pickle`` is False.
    """
    for name in (_SAFETENSORS, _PICKLED):
        index = folder / (name + _INDEX_SUFFIX)
        if (folder / name).is_file():
            names = [name]
        elif index.is_file():
            weight_map = read_json(index, "download the folder again").get("weight_map")
            names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
            if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
                raise UserError(f"{index}: field weight_map: expected tensor names and file names")
        else:
            continue
        if name == _PICKLED and not allow_pickle:
            raise UserError(
                f"{folder} has its weights only in {_PICKLED}, a pickle, which can contain code; "
                f"pass a folder with {_SAFETENSORS}, or convert its tensors to a checkpoint with "
                "tools/convert_checkpoint.py from-huggingface --allow-pickle"
            )
        files = [folder / name for name in names]
        missing = next((path for path in files if not path.is_file()), None)
        if missing:
            raise UserError(f"{missing} is missing, but listed in {index}; download it again")
        return files
    raise UserError(f"{folder} holds no weights: it has no {_SAFETENSORS}")


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


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: Tensors,
    tokenizer: Tokenizer,
    provenance: Provenance,
    max_shard_size: str,
) -> None:
    """Atomically write a folder that transformers can load; call :func:`check_output` first.

    Raises:
        UserError: if the folder cannot be written; an existing folder is then unchanged.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write_json(temporary / CONFIG_NAME, config)
        tokenizer.save(temporary)
        if tokenizer.file.kind == "tokenizers":
            eod = tokenizer.eod_token
            # With this file transformers uses tokenizer.json unchanged, with the end-of-document
            # token.
            body = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": eod,
                "eos_token": eod,
                "unk_token": None,
                "model_max_length": config.get("n_positions") or config["max_position_embeddings"],
                "clean_up_tokenization_spaces": False,
            }
            write_json(temporary / "tokenizer_config.json", body)
        write_json(temporary / PROVENANCE_NAME, dataclasses.asdict(provenance))
        save_torch_state_dict(tensors, temporary, max_shard_size=max_shard_size)
        for path in temporary.iterdir():
            shutil.copymode(temporary / CONFIG_NAME, path)  # safetensors creates mode 0600
            flush_to_disk(path)
        replace_folder(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
