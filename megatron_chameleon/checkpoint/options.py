"""Options of convert_checkpoint and push, and of the tokenizer of a checkpoint."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

from megatron_chameleon.errors import UserError
from megatron_chameleon.ranges import CheckedOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerChoice(CheckedOptions):
    """Location of the tokenizer, for a checkpoint whose own tokenizer cannot be found."""

    tokenizer_model: Path | None = None
    """The tokenizer that the model was trained with, or a corpus made with that tokenizer; default:
    the tokenizer of the checkpoint's training or conversion, or that in the Hugging Face
    folder."""
    tiktoken_pattern: str | None = None
    """Pattern by which a tiktoken file splits text into words; default: the checkpoint's pattern. A
    corpus records its own pattern."""
    eod_token: str | None = None
    """The tokenizer's end-of-document token; default: the checkpoint's token, or the
    end-of-text token of the Hugging Face folder, or else <|endoftext|>. A corpus records its own
    end-of-document token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceFormat(TokenizerChoice):
    """Format of the weights in a Hugging Face folder, and location of the tokenizer."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the written weights; only float32 is lossless."""
    max_shard_size: str = "5GB"
    """Maximum size of a weight file; larger weights are sharded into several files."""

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if not re.fullmatch(r"(?=.*[1-9])\d{1,9}(\.\d{1,9})? ?[KMGTkmgt][Bb]", self.max_shard_size):
            raise UserError(f"--max-shard-size {self.max_shard_size}: pass a size such as 5GB")


@dataclasses.dataclass(frozen=True)
class ToHuggingFaceOptions(HuggingFaceFormat):
    """Convert a checkpoint of any layout to a Hugging Face folder."""

    checkpoint: Path
    """A run folder, whose latest checkpoint is converted, a checkpoint folder, also of Megatron-LM,
    or a Hugging Face folder or hub name (OWNER/MODEL), which is written again, such as in another
    --dtype."""
    output: Path
    """The folder to write, with config.json, weights in safetensors and the tokenizer."""
    overwrite: bool = False
    """Replace the model that the output folder already holds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PushOptions(HuggingFaceFormat):
    """Write the model of a finished run as a Hugging Face repository, to a folder or to the hub.

    The repository holds the model, its tokenizer, its mixture, its provenance and a model card.
    Other models than runs have no mixture.
    """

    run: Path
    """Folder of the training run, such as runs/mine/5-base/chameleon-pretrain-seed1, or any other
    model that evaluate accepts."""
    output: Path | None = None
    """The folder to write, which must not exist."""
    hub: str | None = None
    """Upload to this repository of the Hugging Face hub, OWNER/NAME, which is created if needed."""
    private: bool = False
    """Require the repository on the hub to be private; a new repository becomes private."""
    evaluations: tuple[Path, ...] | None = None
    """Results of evaluate perplexity and evaluate downstream for the model card; default: those of
    the run's last checkpoint in 6-evaluation of the run folder."""
    license: str | None = None
    """License in the model card, by its name on the hub, such as apache-2.0; default: none."""
    language: tuple[str, ...] = ()
    """Languages in the model card, as ISO 639 codes such as en; default: none."""

    def __post_init__(self) -> None:
        """Check the values, and that a target is passed."""
        super().__post_init__()
        if self.output is None and self.hub is None:
            raise UserError("no target: pass --output FOLDER, --hub OWNER/NAME, or both")
        if self.hub is None:
            self.reject_changed(["private"], "has no effect without --hub")
        elif not re.fullmatch(r"[\w.-]+/[\w.-]+", self.hub):
            raise UserError(f"--hub {self.hub}: pass OWNER/NAME")


@dataclasses.dataclass(frozen=True)
class FromHuggingFaceOptions(TokenizerChoice):
    """Convert a Hugging Face folder to a checkpoint of step 0, loadable in any layout."""

    model: Path
    """The folder or hub name (OWNER/MODEL) to read, with config.json, weights in safetensors and
    the tokenizer; or any other model that --checkpoint accepts, without its training state."""
    output: Path
    """The checkpoint folder to write."""
    allow_pickle: bool = False
    """Read weights in torch's own format (pytorch_model.bin) if there is no safetensors file. Only
    tensors are read; code in the file is an error."""
    overwrite: bool = False
    """Replace the checkpoint that the output folder already holds."""


@dataclasses.dataclass(frozen=True)
class FromMegatronOptions(TokenizerChoice):
    """Convert a Megatron-LM checkpoint to a checkpoint of its weights, loadable in any layout."""

    checkpoint: Path
    """A folder that Megatron-LM wrote for --save, or its folder of one iteration (iter_0001000), in
    the format torch_dist; or any other model that --checkpoint accepts."""
    output: Path
    """The checkpoint folder to write."""
    overwrite: bool = False
    """Replace the checkpoint that the output folder already holds."""
