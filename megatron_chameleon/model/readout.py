"""Compute hidden states and token losses of a trained model, forward-only, in any layout.

A batch passes through the pipeline stages in turn. Each stage receives the hidden states of the
previous stage, runs its layers, and sends its output if a later stage needs it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.flops import embedding_flops
from megatron_chameleon.model.layers import additive_mask
from megatron_chameleon.parallel.layout import Layout

# Attention kernels are planned per shape, so few distinct shapes are faster than minimal padding.
LENGTH_MULTIPLE_ON_GPU = 64
DEFAULT_WINDOW_LIMIT = 4096
"""Default tokens per window of a model that has more positions."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """A model in evaluation mode and this rank's layout.

    Attributes:
        model: this rank's part of the model.
        config: the whole model.
        layout: layout of this rank.
        later_chunks: the other model chunks of this rank, if pipeline stages are interleaved.
    """

    model: GPTModel
    config: ModelConfig
    layout: Layout
    later_chunks: Sequence[GPTModel] = ()

    @property
    def hidden_size(self) -> int:
        """Features of a hidden state."""
        return self.config.hidden_size

    @property
    def max_sequence_length(self) -> int:
        """Maximum tokens of a sequence."""
        return self.config.max_positions

    @property
    def num_embeddings(self) -> int:
        """Number of token ids that the model has an embedding for."""
        return self.config.vocab_size

    def embedding_flops(self, layer: int, tokens: int, seq_length: int) -> float:
        """Count FLOPs of the first ``layer`` layers on sequences of ``seq_length`` tokens."""
        return embedding_flops(self.config, layer, tokens, seq_length)

    @torch.no_grad()
    def hidden_states(
        self, tokens: torch.Tensor, layer: int, lengths: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Compute the hidden states after ``layer`` layers, before the final norm.

        Args:
            tokens: [b, s] int64; equal on all ranks of this data-parallel replica. Under sequence
                parallelism s is a multiple of the tensor-parallel size.
            layer: from 1 to num_layers. Later layers and the output layer do not run.
            lengths: unused, since causal attention ignores padding at the end of a row.

        Returns:
            [s, b, h] on the ranks of the stage that holds ``layer``, None on other ranks.
        """
        for chunk in (self.model, *self.later_chunks):
            mine = [block for block in chunk.decoder.layers if block.layer_number <= layer]
            if not mine:
                return None  # this stage starts after ``layer`` and receives nothing
            hidden = self._receive(tokens, chunk)
            if chunk.pre_process:
                hidden = chunk.embedding(input_ids=tokens, position_ids=_positions(tokens))
            rotary = chunk.rotary_pos_emb(tokens.size(1)) if self.config.is_rotary else None
            for block in mine:
                hidden, _ = block(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)
            if mine[-1].layer_number == layer:
                return self._whole(hidden)
            self._pipeline.send_forward(hidden, is_last_stage=False)
        return None

    @torch.no_grad()
    def token_losses(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """Compute negative log-likelihoods of ``labels`` [b, s] given ``tokens`` [b, s], in nats.

        Returns:
            [b, s] in float32 on the last pipeline stage, None on other stages.
        """
        assert not self.later_chunks, "only training interleaves pipeline stages"
        self.model.set_input_tensor(self._receive(tokens, self.model))
        output = self.model(tokens, _positions(tokens), None, labels=labels)
        self._pipeline.send_forward(output, self.layout.is_last_stage)
        return output.detach().float() if self.layout.is_last_stage else None

    @torch.no_grad()
    def final_hidden_states(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Compute the hidden states after the final norm, the output layer's input.

        Args:
            tokens: [b, s] int64, as in :meth:`hidden_states`.
            positions: [b, s] int64, the position of each token.
            attention_mask: [b, 1, s, s] bool, True where attention is masked (Megatron's
                convention); default: causal. Every token must attend to at least one token.

        Returns:
            [s, b, h] on the last pipeline stage, None on other stages.
        """
        assert not self.later_chunks, "only training interleaves pipeline stages"
        hidden = None
        if self.layout.is_first_stage:
            hidden = self.model.embedding(input_ids=tokens, position_ids=positions)
        self.model.set_input_tensor(self._receive(tokens, self.model))
        dtype = self.model.config.params_dtype
        mask = None if attention_mask is None else additive_mask(attention_mask, dtype)
        rotary = self.model.rotary_pos_emb.at(positions) if self.config.is_rotary else None
        hidden = self.model.decoder(
            hidden_states=hidden, attention_mask=mask, rotary_pos_emb=rotary
        )
        self._pipeline.send_forward(hidden, self.layout.is_last_stage)
        return self._whole(hidden) if self.layout.is_last_stage else None

    def _whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather [s, b, h] from sequence-parallel shards."""
        if self.layout.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        return hidden.detach()  # megatron's layers mark their outputs as requiring gradients

    @functools.cached_property
    def _pipeline(self) -> P2PCommunicator:
        group = parallel_state.get_pipeline_model_parallel_group()
        return P2PCommunicator(group, self.model.config)

    def _receive(self, tokens: torch.Tensor, chunk: GPTModel) -> Any:
        """Receive the input of ``chunk`` from the previous stage; None for the first chunk."""
        batch, length = tokens.shape
        if self.layout.sequence_parallel:
            length //= self.layout.tensor_size
        shape = (length, batch, self.config.hidden_size)
        return self._pipeline.recv_forward(shape, chunk.pre_process)

    def final_norm(self) -> tuple[torch.Tensor, float]:
        """Return the final norm's parameters [p, h] float32 and its epsilon.

        The parameters are LayerNorm's weight and bias, or RMSNorm's weight. Collective: only the
        last pipeline stage holds the final norm, and every rank gets the result.
        """
        norm = (self.model, *self.later_chunks)[-1].decoder.final_layernorm
        shape = self.config.norm_parameters, self.config.hidden_size
        values = torch.zeros(shape, device=self.layout.device)
        has_result = self.layout.is_last_stage and self.layout.data_rank == 0
        if has_result:
            values = torch.stack([part.detach() for part in norm.parameters()]).float()
        whole = self.sum_over_ranks(values, has_result=has_result)
        return whole, self.model.config.layernorm_epsilon

    def sum_over_ranks(self, values: torch.Tensor, *, has_result: bool) -> torch.Tensor:
        """Sum ``values`` over the ranks with a result, on every rank. Collective.

        ``has_result`` is true on the ranks of the stage that holds the result. Tensor-parallel
        ranks hold the same values, so only the first tensor-parallel rank is counted.
        """
        if not (has_result and self.layout.tensor_rank == 0):
            values = torch.zeros_like(values)
        dist.all_reduce(values)
        return values


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)


def length_multiple(layout: Layout) -> int:
    """Return the multiple to which sequence lengths are padded.

    Sequence parallelism and fast attention kernels need padding. Padding is appended at the end,
    where causal attention ignores it.
    """
    multiple = layout.tensor_size if layout.sequence_parallel else 1
    on_gpu = layout.device.type == "cuda"
    return math.lcm(multiple, LENGTH_MULTIPLE_ON_GPU) if on_gpu else multiple


def padded_length(length: int, multiple: int) -> int:
    """Round ``length`` up to a multiple of ``multiple``."""
    return math.ceil(length / multiple) * multiple


def length_batches(
    lengths: Sequence[int], tokens_at_once: int, multiple: int, longest: int, min_fill: float = 0.0
) -> Iterator[tuple[int, int, int]]:
    """Yield batches of consecutive sequences: first, last (exclusive), and padded width.

    The longest sequences come first, so that a batch too large for the memory fails early.

    Args:
        lengths: tokens of each sequence, > 0, in descending order.
        tokens_at_once: maximum number of tokens of a batch, with padding; a longer sequence forms a
            batch alone.
        multiple: widths are multiples of this number, up to ``longest``.
        longest: maximum width.
        min_fill: every sequence of a batch has at least this fraction of the tokens of its longest
            sequence.
    """
    first = 0
    while first < len(lengths):
        width = min(padded_length(lengths[first], multiple), longest)
        last = first + 1
        while (
            last < len(lengths)
            and (last + 1 - first) * width <= tokens_at_once
            and lengths[last] >= min_fill * lengths[first]
        ):
            last += 1
        yield first, last, width
        first = last


def check_layer(num_layers: int, layer: int | None, flag: str = "--layer") -> int:
    """Check and return ``layer``; None selects the middle layer, (num_layers + 1) // 2.

    The authors' code takes the middle one of the num_layers + 1 hidden states, of which the first
    is the embedding.

    Raises:
        UserError: if the model has no such layer.
    """
    if layer is None:
        return (num_layers + 1) // 2
    if not 1 <= layer <= num_layers:
        raise UserError(f"{flag} {layer}: the model has layers 1 to {num_layers}")
    return layer


def default_window(config: ModelConfig) -> int:
    """Return the default of ``--window-length``: the model's sequence length.

    A model with rotary positions accepts any length, and its default is at most
    ``DEFAULT_WINDOW_LIMIT``: public models have up to a million positions.
    """
    longest = DEFAULT_WINDOW_LIMIT if config.is_rotary else config.max_positions
    return min(config.max_sequence_length, longest)


def check_window(longest: int, default: int, window_length: int | None) -> int:
    """Check and return ``window_length``; None selects ``default``.

    Raises:
        UserError: if ``window_length`` is more than ``longest``, the number of positions.
    """
    if window_length is None:
        return default
    if not 1 <= window_length <= longest:
        raise UserError(
            f"--window-length {window_length}: the model has positions for 1 to {longest} tokens"
        )
    return window_length
