"""The proxy that embeds text: any model, in our GPT or in transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

import torch

from megatron_chameleon.artifacts import Corpus, EmbeddingRecipe
from megatron_chameleon.checkpoint.open_model import HuggingFaceModel, Model, open_model
from megatron_chameleon.checkpoint.options import TokenizerChoice
from megatron_chameleon.corpus.encode import TextEncoder
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import FORWARD, TRAINING, paper_parameters
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import default_window
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.parallel.options import ParallelOptions


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

    @property
    def num_embeddings(self) -> int:
        """Number of token ids that the proxy has an embedding for."""

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
class Proxy:
    """A model that embeds text; its weights are not loaded yet. This class runs it as our GPT.

    Attributes:
        model: the model.
        hash: hex SHA-256 of everything that determines its hidden states.
        num_layers: layers of the whole model.
        hidden_size: features of a hidden state.
        max_sequence_length: maximum tokens per window.
        default_window_length: tokens per window unless the user sets a number.
        paper_parameters: the paper's N: parameters of all layers, without embeddings and output
            layer.
    """

    model: Model
    hash: str
    num_layers: int
    hidden_size: int
    max_sequence_length: int
    default_window_length: int
    paper_parameters: int

    def check(self, recipe: EmbeddingRecipe, parallel: ParallelOptions) -> None:
        """Raise UserError for a recipe or a layout that the proxy does not support."""
        check_model_layout(self.model.config, parallel, recipe.window_length)

    def reads_ids_of(self, corpus: Corpus) -> bool:
        """Return whether the token ids of ``corpus`` mean the same to the proxy.

        Raises:
            UserError: if they do not, and text cannot be encoded for the proxy either.
        """
        self.model.for_corpus(corpus)
        return True

    def open_encoder(self) -> TextEncoder:
        """Open the proxy's tokenizer.

        Raises:
            UserError: if it is missing or damaged, or the user's choice of it has no effect.
        """
        return self.model.tokenizer()

    def open_reader(self, layout: Layout, recipe: EmbeddingRecipe) -> ProxyReader:
        """Load the weights. Collective.

        Args:
            layout: layout of this rank.
            recipe: layer to read, and the compute precision.

        Raises:
            UserError: if the weights are damaged.
        """
        return self.model.reader(layout, bf16=recipe.dtype == "bfloat16")

    @property
    def training_paper_flops(self) -> float:
        """FLOPs of training the proxy by the paper's rule, 6 N D; 0 if it was trained elsewhere."""
        return float(TRAINING * self.paper_parameters * self.model.trained_tokens)

    def embedding_paper_flops(self, tokens: int) -> float:
        """Count FLOPs of embedding ``tokens`` tokens by the paper's rule, 2 N D."""
        return float(FORWARD * self.paper_parameters * tokens)


def open_proxy(
    path: Path, *, trust_remote_code: bool = False, tokenizer: TokenizerChoice | None = None
) -> Proxy:
    """Open the proxy of ``--checkpoint``, without loading its weights.

    A Hugging Face model is run by transformers, which supports families that our GPT does not.

    Args:
        path: see :func:`~megatron_chameleon.checkpoint.open_model.open_model`.
        trust_remote_code: allow Python code in a Hugging Face folder to run.
        tokenizer: location of the tokenizer of a checkpoint; default: the recorded one.

    Raises:
        UserError: if there is no such model, or it cannot be a proxy.
    """
    model = open_model(path, tokenizer=tokenizer, with_code=trust_remote_code)
    if isinstance(model, HuggingFaceModel):
        from megatron_chameleon.embedding.transformers_proxy import TransformersProxy

        return TransformersProxy.find(model, trust_remote_code=trust_remote_code)
    if trust_remote_code:
        raise UserError(
            f"--trust-remote-code has no effect: {path} is not a Hugging Face model; leave it out"
        )
    config = model.config
    return Proxy(
        model=model,
        hash=model.hash,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        max_sequence_length=config.max_positions,
        default_window_length=default_window(config),
        paper_parameters=paper_parameters(config),
    )
