"""Read and write Hugging Face model folders.

Weights go through safetensors and huggingface_hub; transformers is not needed.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_chameleon.artifacts import CheckpointRecord, Provenance
from megatron_chameleon.artifacts.files import (
    cannot_write,
    flush_to_disk,
    read_foreign_json,
    replace_folder,
    sha256_of_files,
    write_json,
)
from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError, first_line
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.gpt import unwrap
from megatron_chameleon.model.huggingface import (
    Tensors,
    checked_tensors,
    load_huggingface,
)
from megatron_chameleon.model.huggingface_config import (
    CONFIG_NAME,
    FoundConfig,
    read_model_config,
)

PROVENANCE_NAME = "provenance.json"
_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_INDEX_SUFFIX = ".index.json"


def is_huggingface_folder(folder: Path) -> bool:
    """Return whether ``folder`` holds a transformers model, complete or not, and no checkpoint."""
    names = (CONFIG_NAME, _SAFETENSORS, _SAFETENSORS + _INDEX_SUFFIX, _PICKLED)
    is_checkpoint = (folder / CheckpointRecord.FILE_NAME).is_file()
    return not is_checkpoint and any((folder / name).is_file() for name in names)


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
            lines.append(
                f"its dropout of {dropout:g} is not used: pass --hidden-dropout and "
                "--attention-dropout to train with dropout"
            )
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
