"""The proxy that embeds text: a checkpoint of ours or of Megatron-LM, or a transformers model."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

import torch

from megatron_chameleon.artifacts import Corpus, EmbeddingRecipe
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.checkpoint.huggingface import is_huggingface_folder
from megatron_chameleon.checkpoint.load import (
    config_of,
    find_tokenizer,
    open_checkpoint,
    open_reader,
    require_tokenizer,
)
from megatron_chameleon.checkpoint.options import TokenizerChoice
from megatron_chameleon.corpus.encode import TextEncoder
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.flops import FORWARD, TRAINING, paper_parameters
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import default_window
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.parallel.options import ParallelOptions

# A name on the Hugging Face hub: OWNER/MODEL.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ProxyReader(Protocol):
    """A loaded proxy on this rank, as ``embed_windows`` uses it."""

    @property
    def layout(self) -> Layout:
        """Layout of this rank."""

    @property
    def hidden_size(self) -> int:
        """Features of a hidden state, h."""

    @property
    def max_sequence_length(self) -> int:
        """Maximum tokens per window."""

    def hidden_states(
        self, tokens: torch.Tensor, layer: int, lengths: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Compute the hidden states after ``layer`` layers, before the final norm.

        Args:
            tokens: [b, s] int64, each row padded at its end.
            layer: from 1 to num_layers. Later layers do not run.
            lengths: [b] tokens of each row without padding; default: s each.

        Returns:
            [s, b, h]; positions of padding hold any values. None on ranks without this layer.
        """

    def final_norm(self) -> tuple[torch.Tensor, float]:
        """Return the final norm's parameters [p, h] float32, and its epsilon.

        The parameters are LayerNorm's weight and bias, or RMSNorm's weight.
        """

    def sum_over_ranks(self, values: torch.Tensor, *, has_result: bool) -> torch.Tensor:
        """Sum ``values`` over the ranks with a result, on every rank. Collective."""

    def embedding_flops(self, layer: int, tokens: int, seq_length: int) -> float:
        """Count FLOPs of the first ``layer`` layers on ``tokens`` tokens."""


@dataclasses.dataclass(frozen=True)
class Proxy(ABC):
    """A validated proxy whose weights are not loaded yet.

    Attributes:
        where: folder of the model, for messages.
        hash: hex SHA-256 of everything that determines its hidden states.
        num_layers: layers of the whole model.
        hidden_size: features of a hidden state.
        max_sequence_length: maximum tokens per window.
        default_window_length: tokens per window unless the user sets a number.
    """

    where: Path
    hash: str
    num_layers: int
    hidden_size: int
    max_sequence_length: int
    default_window_length: int

    @property
    @abstractmethod
    def paper_parameters(self) -> int:
        """The paper's N: parameters of all layers, without embeddings and output layer."""

    @property
    def trained_tokens(self) -> int:
        """Tokens of the proxy's training; 0 if it was trained elsewhere."""
        return 0

    @abstractmethod
    def check(self, recipe: EmbeddingRecipe, parallel: ParallelOptions) -> None:
        """Raise UserError for a recipe or a layout that the proxy does not support."""

    @abstractmethod
    def reads_ids_of(self, corpus: Corpus) -> bool:
        """Return whether the token ids of ``corpus`` mean the same to the proxy.

        Raises:
            UserError: if they do not, and text cannot be encoded for the proxy either.
        """

    @abstractmethod
    def open_encoder(self, choice: TokenizerChoice) -> TextEncoder:
        """Open the proxy's tokenizer.

        Args:
            choice: location of the tokenizer, for a checkpoint of ours.

        Raises:
            UserError: if it is missing or damaged, or ``choice`` has no effect.
        """

    @abstractmethod
    def open_reader(self, layout: Layout, recipe: EmbeddingRecipe) -> ProxyReader:
        """Load the weights. Collective.

        Args:
            layout: layout of this rank.
            recipe: layer to read, and the compute precision.

        Raises:
            UserError: if the weights are damaged.
        """

    @property
    def training_paper_flops(self) -> float:
        """FLOPs of training the proxy by the paper's rule, 6 N D; 0 if it was trained elsewhere."""
        return float(TRAINING * self.paper_parameters * self.trained_tokens)

    def embedding_paper_flops(self, tokens: int) -> float:
        """Count FLOPs of embedding ``tokens`` tokens by the paper's rule, 2 N D."""
        return float(FORWARD * self.paper_parameters * tokens)


@dataclasses.dataclass(frozen=True)
class CheckpointProxy(Proxy):
    """A checkpoint of this package or of Megatron-LM.

    Attributes:
        record: its checkpoint.json.
        config: its model.
    """

    record: CheckpointRecord
    config: ModelConfig

    @classmethod
    def find(cls, path: Path, tokenizer: TokenizerChoice | None = None) -> CheckpointProxy:
        """Find and verify the checkpoint ``path``; the arguments are those of `open_checkpoint`."""
        record = open_checkpoint(path, tokenizer=tokenizer)
        config = config_of(record)
        return cls(
            where=record.root,
            hash=record.hash,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            max_sequence_length=config.max_positions,
            default_window_length=default_window(config),
            record=record,
            config=config,
        )

    @property
    def paper_parameters(self) -> int:
        """N by the paper's count of this size."""
        return paper_parameters(self.config)

    @property
    def trained_tokens(self) -> int:
        """Training tokens seen."""
        return sum(self.record.domain_tokens.values())

    def check(self, recipe: EmbeddingRecipe, parallel: ParallelOptions) -> None:
        """Raise UserError if the model cannot be sharded as ``parallel`` requires."""
        check_model_layout(self.config, parallel, recipe.window_length)

    def reads_ids_of(self, corpus: Corpus) -> bool:
        """Raise UserError if the checkpoint was trained with another tokenizer."""
        require_tokenizer(self.record, corpus)
        return True

    def open_encoder(self, choice: TokenizerChoice) -> TextEncoder:
        """Open the tokenizer of the training data."""
        return find_tokenizer(choice, self.record)

    def open_reader(self, layout: Layout, recipe: EmbeddingRecipe) -> ProxyReader:
        """Build this rank's part of the model and load its weights. Collective."""
        return open_reader(self.record, layout, bf16=recipe.dtype == "bfloat16")


def open_proxy(
    path: Path, *, trust_remote_code: bool = False, tokenizer: TokenizerChoice | None = None
) -> Proxy:
    """Find and check the proxy of ``--checkpoint``, without loading its weights.

    Args:
        path: a run or a checkpoint of ours, a checkpoint of Megatron-LM, a Hugging Face folder, or
            the name OWNER/MODEL of a model on the Hugging Face hub, which is downloaded.
        trust_remote_code: allow Python code in a Hugging Face folder to run.
        tokenizer: location of the tokenizer of Megatron-LM's checkpoint; default: the recorded one.

    Raises:
        UserError: if there is no such model, or it cannot be a proxy.
    """
    is_on_hub = not path.exists() and _HUB_NAME.fullmatch(str(path))
    if is_on_hub or is_huggingface_folder(path):
        from megatron_chameleon.embedding.transformers_proxy import TransformersProxy, download

        folder = download(str(path), with_code=trust_remote_code) if is_on_hub else path
        return TransformersProxy.find(folder, trust_remote_code=trust_remote_code)
    if trust_remote_code:
        raise UserError(
            f"--trust-remote-code has no effect: {path} is not a Hugging Face model; leave it out"
        )
    return CheckpointProxy.find(path, tokenizer)
