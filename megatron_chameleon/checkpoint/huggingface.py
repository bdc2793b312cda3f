"""Read and write Hugging Face model folders.

Weights go through safetensors and huggingface_hub; transformers is not needed.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from megatron_chameleon.artifacts import CheckpointRecord, Provenance
from megatron_chameleon.artifacts.files import (
    cannot_write,
    flush_to_disk,
    read_foreign_json,
    replace_folder,
    write_json,
)
from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError, first_line
from megatron_chameleon.model.huggingface_config import CONFIG_NAME
from megatron_chameleon.model.huggingface_tensors import Tensors

PROVENANCE_NAME = "provenance.json"
_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_INDEX_SUFFIX = ".index.json"
_DOWNLOADED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja"]
CODE = "*.py"
# Subfolders hold other formats (ONNX, GGUF); consolidated files repeat the weights.
_NOT_DOWNLOADED = ["*/*", "consolidated*"]


def is_huggingface_folder(folder: Path) -> bool:
    """Return whether ``folder`` holds a transformers model, complete or not, and no checkpoint."""
    names = (CONFIG_NAME, _SAFETENSORS, _SAFETENSORS + _INDEX_SUFFIX, _PICKLED)
    is_checkpoint = (folder / CheckpointRecord.FILE_NAME).is_file()
    return not is_checkpoint and any((folder / name).is_file() for name in names)


def download(name: str, flag: str, *, with_code: bool) -> Path:
    """Download a model from the Hugging Face hub, or find its copy in the hub's cache.

    Args:
        name: OWNER/MODEL.
        flag: the option with this name, for messages.
        with_code: download the Python code of the model too.

    Returns:
        The folder in the cache.

    Raises:
        UserError: if the hub has no such model, or is not reachable.
    """
    hint = f"{flag} {name}: no such folder here, and"
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            allow_patterns=[*_DOWNLOADED, *([CODE] if with_code else [])],
            ignore_patterns=_NOT_DOWNLOADED,
        )
    except (HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"{hint} the Hugging Face hub has no model of this name that you may read "
            f"({first_line(error)}); check the name, or log in with `hf auth login`"
        ) from error
    except OSError as error:
        raise UserError(
            f"{hint} the Hugging Face hub is not reachable ({first_line(error)}); pass a folder of "
            "a run, a checkpoint or a downloaded model"
        ) from error
    return Path(folder)


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


def stored_types(files: Sequence[Path]) -> dict[str, str]:
    """Read the type of every tensor in safetensors files, such as BF16, without its values.

    Raises:
        UserError: if a file is damaged or cannot be read.
    """
    types: dict[str, str] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as tensors:
                types |= {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        except OSError as error:
            raise UserError(
                f"cannot read {path} ({first_line(error)}); check its permissions and its disk"
            ) from error
        except SafetensorError as error:
            raise UserError(
                f"cannot read {path} ({first_line(error)}): it is damaged; download the model again"
            ) from error
    return types


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
            weight_map = read_foreign_json(index, "download the folder again").get("weight_map")
            names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
            suffix = Path(name).suffix  # an index of safetensors must not name a pickle
            if not names or not all(
                isinstance(n, str) and Path(n).name == n and n.endswith(suffix) for n in names
            ):
                raise UserError(
                    f"{index}: field weight_map: expected tensor names and names of {suffix} files"
                )
        else:
            continue
        if name == _PICKLED and not allow_pickle:
            raise UserError(
                f"{folder} has its weights only in {_PICKLED}, a pickle, which can contain code; "
                f"pass a folder with {_SAFETENSORS}, or convert its tensors to a checkpoint with "
                "megatron-chameleon convert_checkpoint from-huggingface --allow-pickle"
            )
        files = [folder / name for name in names]
        missing = next((path for path in files if not path.is_file()), None)
        if missing:
            raise UserError(f"{missing} is missing, but listed in {index}; download it again")
        return files
    raise UserError(f"{folder} holds no weights: it has no {_SAFETENSORS}")


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: Tensors,
    tokenizer: Tokenizer,
    provenance: Provenance,
    max_shard_size: str,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Atomically write a folder that transformers can load, and replace a folder of this name.

    ``write_more`` is called with the temporary folder and writes further files to it.

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
        if write_more is not None:
            write_more(temporary)
        for path in temporary.iterdir():
            shutil.copymode(temporary / CONFIG_NAME, path)  # safetensors creates mode 0600
            flush_to_disk(path)
        replace_folder(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
