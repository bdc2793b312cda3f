"""A Hugging Face GPT-2 folder on disk: config.json, weights and tokenizer, read and written.

Weights are read and written by safetensors and huggingface_hub, which the tokenizers package brings
along; transformers itself is not needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_chameleon.artifacts import Provenance
from megatron_chameleon.artifacts.files import (
    cannot_write,
    flush_to_disk,
    put_back,
    read_json,
    remove_replaced,
    replace_folder,
    write_json,
    writing,
)
from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.huggingface import Tensors

CONFIG_NAME = "config.json"
PROVENANCE_NAME = "provenance.json"
_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_INDEX_SUFFIX = ".index.json"


def is_huggingface_folder(folder: Path) -> bool:
    """Whether ``folder`` looks like a model of transformers, whole or not."""
    names = (CONFIG_NAME, _SAFETENSORS, _SAFETENSORS + _INDEX_SUFFIX, _PICKLED)
    return any((folder / name).is_file() for name in names)


def find_weights(folder: Path, *, allow_pickle: bool) -> list[Path]:
    """The files that hold the weights of ``folder``: one, or those that its index names.

    Args:
        folder: of the model.
        allow_pickle: take torch's own format where there is no safetensors file.

    Raises:
        UserError: if there are none of a format that may be read.
    """
    for name in (_SAFETENSORS, _PICKLED):
        found = _files_called(folder, name)
        if not found:
            continue
        if name == _PICKLED and not allow_pickle:
            raise UserError(
                f"{folder} has its weights in {_PICKLED} alone, which is a pickle and can hold "
                f"code; get it with {_SAFETENSORS}, or make a checkpoint of it by "
                "tools/convert_checkpoint.py from-huggingface --allow-pickle, which reads tensors "
                "of it"
            )
        return found
    raise UserError(f"{folder} holds no weights: there is no {_SAFETENSORS} in it")


def read_tensors(files: Sequence[Path]) -> Tensors:
    """Every tensor in ``files``, on the CPU.

    Raises:
        UserError: if a file is damaged, or asks for more than tensors.
    """
    tensors: Tensors = {}
    for path in files:
        tensors |= _read_pickled(path) if path.suffix == ".bin" else _read_safetensors(path)
    return tensors


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: Tensors,
    tokenizer: Tokenizer,
    provenance: Provenance,
    max_shard_size: str,
) -> None:
    """Write a folder that transformers reads; it has its name only once it is complete.

    Raises:
        UserError: if the disk is full or refuses; what was there before is then as it was.
    """
    with _replacing_folder(folder) as temporary:
        write_json(temporary / CONFIG_NAME, config)
        tokenizer.save(temporary)
        if tokenizer.file.kind == "tokenizers":
            body = _tokenizer_config(tokenizer, config["n_positions"])
            write_json(temporary / "tokenizer_config.json", body)
        write_json(temporary / PROVENANCE_NAME, dataclasses.asdict(provenance))
        try:
            save_torch_state_dict(tensors, temporary, max_shard_size=max_shard_size)
        except SafetensorError as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"cannot write {folder} ({reason}); free space or choose another folder"
            ) from error
        for path in temporary.glob("*.safetensors"):  # made unreadable for others
            shutil.copymode(temporary / CONFIG_NAME, path)


def check_output(folder: Path, marker: str, *, overwrite: bool) -> None:
    """Refuse to write where something is that is not to be replaced.

    Args:
        folder: to be written.
        marker: the file by which a folder of the kind to be written is known.
        overwrite: whether one of that kind may be replaced.

    Raises:
        UserError: saying what is there.
    """
    with writing(folder):
        put_back(folder)  # one whose replacement was cut off is there
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir() or folder.is_symlink():
        raise UserError(f"--output {folder} is no folder of its own; give a new one")
    if not any(folder.iterdir()):
        return
    if not (folder / marker).is_file():
        raise UserError(
            f"--output {folder} holds other files and no {marker}; give a new folder, since the "
            "whole folder would be replaced"
        )
    if not overwrite:
        raise UserError(
            f"--output {folder} holds a {marker} already; give another folder, or --overwrite to "
            "replace the whole folder"
        )


def _files_called(folder: Path, name: str) -> list[Path]:
    """The file ``name`` in ``folder``, or the shards that its index names, or nothing."""
    index = folder / (name + _INDEX_SUFFIX)
    if (folder / name).is_file():
        return [folder / name]
    if not index.is_file():
        return []
    weight_map = read_json(index, "get the folder again").get("weight_map")
    names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise UserError(f"{index}: field weight_map: it does not say which files hold the weights")
    for path in (folder / shard for shard in names):
        if not path.is_file():
            raise UserError(f"{path} is missing, which {index} names; get the folder again")
    return [folder / shard for shard in names]


def _read_safetensors(path: Path) -> Tensors:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _read_pickled(path: Path) -> Tensors:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    # A damaged file makes torch's unpickler raise almost anything, from KeyError to struct.error.
    except Exception as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        raise UserError(f"{path} holds other things than named tensors; give a model's weights")
    return dict(found)


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"cannot read {path} ({reason}): it is damaged; get it again")


def _tokenizer_config(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    """What tells transformers to take tokenizer.json as it is, and which token ends documents."""
    library = tokenizers.Tokenizer.from_str(tokenizer.file.content.decode("utf-8"))
    eod = library.id_to_token(tokenizer.eod_id)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eod,
        "eos_token": eod,
        "unk_token": None,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }


@contextlib.contextmanager
def _replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``folder``, which takes its place when the block ends well."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        put_back(folder)
        remove_replaced(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.iterdir():
            flush_to_disk(path)
        replace_folder(temporary, folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
