"""Read and write Hugging Face GPT-2 folders: config.json, weights, tokenizer.

Weights go through safetensors and huggingface_hub; transformers is not needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
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
    finish_replacements,
    flush_to_disk,
    read_json,
    replace_folder,
    sha256_of_files,
    write_json,
    writing,
)
from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError, first_line
from megatron_chameleon.model.gpt import unwrap
from megatron_chameleon.model.huggingface import (
    GPT2Config,
    Tensors,
    checked_tensors,
    load_huggingface,
    read_config,
    shape_of_config,
    with_vocabulary,
)
from megatron_chameleon.model.sizes import ModelShape

CONFIG_NAME = "config.json"
PROVENANCE_NAME = "provenance.json"
_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_INDEX_SUFFIX = ".index.json"


def is_huggingface_folder(folder: Path) -> bool:
    """Whether ``folder`` holds a transformers model, complete or not."""
    names = (CONFIG_NAME, _SAFETENSORS, _SAFETENSORS + _INDEX_SUFFIX, _PICKLED)
    return any((folder / name).is_file() for name in names)


@dataclasses.dataclass(frozen=True)
class HuggingFaceWeights:
    """A GPT-2 folder; its tensors stay on disk until :meth:`read` or :meth:`load`.

    Attributes:
        folder: of the model.
        files: files that hold its weights.
        config: content of its config.json.
        vocab_size: embedding rows to read, at most those that exist: public models are padded
            beyond their tokenizer's vocabulary.
    """

    folder: Path
    files: tuple[Path, ...]
    config: GPT2Config
    vocab_size: int

    @classmethod
    def find(cls, folder: Path, *, allow_pickle: bool = False) -> HuggingFaceWeights:
        """Open ``folder`` without reading its tensors.

        Args:
            folder: of the model.
            allow_pickle: accept torch's own format where there is no safetensors file.

        Raises:
            UserError: for an unsupported model, or weights in an unsupported format.
        """
        where = folder / CONFIG_NAME
        config = read_config(read_json(where, "pass a Hugging Face model's folder"), str(where))
        files = _find_weights(folder, allow_pickle=allow_pickle)
        held = sum(path.stat().st_size for path in files)
        shape_of_config(config).require_bytes(held, str(where))
        return cls(folder, tuple(files), config, config.vocab_size)

    @property
    def config_file(self) -> Path:
        """The file that holds the shape."""
        return self.folder / CONFIG_NAME

    @property
    def shape(self) -> ModelShape:
        """The shape of the model that is read."""
        return dataclasses.replace(shape_of_config(self.config), vocab_size=self.vocab_size)

    @property
    def left_out(self) -> list[str]:
        """Descriptions of what is not loaded, one line each."""
        lines = []
        if rows := self.config.vocab_size - self.vocab_size:
            lines.append(
                f"the last {rows} of its {self.config.vocab_size} embedding rows are not loaded: "
                f"the tokenizer has {self.vocab_size} tokens"
            )
        if dropout := self.config.largest_dropout:
            lines.append(f"its dropout of {dropout:g} is not used: models here train without")
        return lines

    def hash(self) -> str:
        """Hex SHA-256 of the files of config and weights."""
        return sha256_of_files(self.config_file, *self.files)

    def read(self) -> Tensors:
        """Read the tensors onto the CPU, under their Hugging Face names.

        Raises:
            UserError: if they are damaged, or do not match the config.
        """
        stored = shape_of_config(self.config)
        tensors = checked_tensors(read_tensors(self.files), stored, str(self.folder))
        return with_vocabulary(tensors, self.vocab_size)

    def load(self, model: Sequence[torch.nn.Module]) -> None:
        """Load the weights into ``model``, this rank's chunks. Raises as :meth:`read`."""
        tensors = self.read()
        for chunk in model:
            load_huggingface(unwrap(chunk), tensors, self.shape)


def read_tensors(files: Sequence[Path]) -> Tensors:
    """Read every tensor in ``files`` onto the CPU.

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
        # A damaged file makes torch's unpickler raise almost anything, from KeyError to
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


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: Tensors,
    tokenizer: Tokenizer,
    provenance: Provenance,
    max_shard_size: str,
) -> None:
    """Write a folder that transformers reads, atomically.

    Raises:
        UserError: if it cannot be written; an existing folder is then unchanged.
    """
    with _replacing_folder(folder) as temporary:
        write_json(temporary / CONFIG_NAME, config)
        tokenizer.save(temporary)
        if tokenizer.file.kind == "tokenizers":
            library = tokenizers.Tokenizer.from_str(tokenizer.file.content.decode("utf-8"))
            eod = library.id_to_token(tokenizer.eod_id)
            body = {  # transformers uses tokenizer.json unchanged, with the end-of-document token
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": eod,
                "eos_token": eod,
                "unk_token": None,
                "model_max_length": config["n_positions"],
                "clean_up_tokenization_spaces": False,
            }
            write_json(temporary / "tokenizer_config.json", body)
        write_json(temporary / PROVENANCE_NAME, dataclasses.asdict(provenance))
        save_torch_state_dict(tensors, temporary, max_shard_size=max_shard_size)
        for path in temporary.glob("*.safetensors"):  # created with mode 0600
            shutil.copymode(temporary / CONFIG_NAME, path)


def check_output(folder: Path, marker: str, *, overwrite: bool) -> None:
    """Check that ``folder`` may be written.

    Args:
        folder: the folder to write.
        marker: file that identifies a folder of this kind.
        overwrite: whether a folder of this kind may be replaced.

    Raises:
        UserError: naming the existing content.
    """
    with writing(folder):
        finish_replacements(folder.parent, glob.escape(folder.name))
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir() or folder.is_symlink():
        raise UserError(f"--output {folder} is not a folder; choose a new one")
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


def _find_weights(folder: Path, *, allow_pickle: bool) -> list[Path]:
    """The weights in ``folder``: one file, or the shards listed in its index."""
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
                f"get it with {_SAFETENSORS}, or convert its tensors to a checkpoint with "
                "tools/convert_checkpoint.py from-huggingface --allow-pickle"
            )
        files = [folder / name for name in names]
        missing = next((path for path in files if not path.is_file()), None)
        if missing:
            raise UserError(f"{missing} is missing, but listed in {index}; download it again")
        return files
    raise UserError(f"{folder} holds no weights: it has no {_SAFETENSORS}")


@contextlib.contextmanager
def _replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces ``folder`` when the block succeeds."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        finish_replacements(folder.parent, glob.escape(folder.name))
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.iterdir():
            flush_to_disk(path)
        replace_folder(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
