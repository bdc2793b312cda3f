"""The weights of a Hugging Face GPT-2 folder, cut to a vocabulary, for a model in any layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_chameleon.artifacts.files import read_json, sha256_of_files
from megatron_chameleon.checkpoint.huggingface_folder import (
    CONFIG_NAME,
    find_weights,
    read_tensors,
)
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


@dataclasses.dataclass(frozen=True)
class HuggingFaceWeights:
    """What is taken of a folder; its tensors stay on disk until :meth:`read` or :meth:`load`.

    Attributes:
        folder: of the model.
        files: that hold its weights.
        config: what its config.json says.
        vocab_size: rows of the embedding that are taken, at most those there are: public models
            have more than their tokenizers have tokens, to be a round number.
    """

    folder: Path
    files: tuple[Path, ...]
    config: GPT2Config
    vocab_size: int

    @classmethod
    def find(cls, folder: Path, *, allow_pickle: bool = False) -> HuggingFaceWeights:
        """All that is in ``folder``; its tensors are not looked at yet.

        Raises:
            UserError: if it holds no model that can be one here, or no weights that may be read.
        """
        where = folder / CONFIG_NAME
        config = read_config(read_json(where, "give a Hugging Face model's folder"), str(where))
        files = find_weights(folder, allow_pickle=allow_pickle)
        held = sum(path.stat().st_size for path in files)
        shape_of_config(config).require_bytes(held, str(where))
        return cls(folder, tuple(files), config, config.vocab_size)

    @property
    def config_file(self) -> Path:
        """What says the shape."""
        return self.folder / CONFIG_NAME

    @property
    def shape(self) -> ModelShape:
        """Of a model that has what is taken."""
        return dataclasses.replace(shape_of_config(self.config), vocab_size=self.vocab_size)

    @property
    def left_out(self) -> list[str]:
        """What is not taken, a line each."""
        lines = []
        rows = self.config.vocab_size - self.vocab_size
        if rows:
            lines.append(
                f"the last {rows} of its {self.config.vocab_size} rows of embedding are left out: "
                f"the tokenizer has {self.vocab_size} tokens"
            )
        if self.config.largest_dropout:
            lines.append(
                f"its dropout of {self.config.largest_dropout:g} is left out: models here train "
                "without"
            )
        return lines

    def hash(self) -> str:
        """Hex SHA-256 of config and weights as they are on disk."""
        return sha256_of_files(self.config_file, *self.files)

    def read(self) -> Tensors:
        """The tensors that are taken, by their names there, on the CPU.

        Raises:
            UserError: if they cannot be read, or are not those of a GPT-2 of this config.
        """
        stored = shape_of_config(self.config)
        tensors = checked_tensors(read_tensors(self.files), stored, str(self.folder))
        return with_vocabulary(tensors, self.vocab_size)

    def load(self, model: Sequence[torch.nn.Module]) -> None:
        """Read the weights into ``model``, this rank's chunks. Raises as :meth:`read`."""
        tensors = self.read()
        for chunk in model:
            load_huggingface(unwrap(chunk), tensors, self.shape)
