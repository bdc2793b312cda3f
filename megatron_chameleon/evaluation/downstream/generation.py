"""Greedy generation until a stop, in any layout.

Nothing is kept from one token to the next: each costs a forward pass over what is there, of all
sequences that have not ended yet. The tasks of the paper generate nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_chameleon.blend.prefetch import to_device
from megatron_chameleon.evaluation.downstream.label_scores import likeliest
from megatron_chameleon.evaluation.downstream.prefix_rows import Tokens
from megatron_chameleon.evaluation.downstream.scoring import Scorer
from megatron_chameleon.model.flops import forward_flops, head_forward_flops
from megatron_chameleon.model.readout import length_multiple, padded_length


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What is to be continued.

    Attributes:
        context: int32, at least one token; its beginning is cut off where there is no room left.
        max_new_tokens: at most so many are generated, fewer than the model can look at.
        stops: generation ends where the text of what was generated holds one of these.
    """

    context: Tokens
    max_new_tokens: int
    stops: tuple[str, ...]


@dataclasses.dataclass
class Growing:
    """A prompt (number ``number``) with what was generated after it so far."""

    number: int
    prompt: Prompt
    tokens: list[int]
    new: list[int] = dataclasses.field(default_factory=list)

    def ends(self, eod_id: int, decode: Callable[[Sequence[int]], str]) -> bool:
        """Whether nothing more is to be generated."""
        if len(self.new) >= self.prompt.max_new_tokens or self.new[-1:] == [eod_id]:
            return True
        text = decode(self.new)
        return any(stop in text for stop in self.prompt.stops)


@dataclasses.dataclass(frozen=True)
class Generated:
    """New tokens of each prompt, an end of document among them; and forward FLOPs of all ranks."""

    tokens: list[list[int]]
    flops: float


class Generator:
    """Continues prompts with the likeliest token, again and again.

    Args:
        scorer: of the same model.
        eod_id: the token that ends a document, and a generation.
        decode: the text of tokens.
    """

    def __init__(self, scorer: Scorer, eod_id: int, decode: Callable[[Sequence[int]], str]) -> None:
        self.scorer = scorer
        self.eod_id = eod_id
        self.decode = decode

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt]) -> Generated:
        """Continue ``prompts``, which are the same on all ranks; all of them get the result."""
        layout = self.scorer.reader.layout
        own: dict[int, list[int]] = {}
        flops = 0.0
        for number, batch in enumerate(self._batches(prompts)):
            if number % layout.data_size == layout.data_rank:
                flops += self._continue(batch)
                own |= {growing.number: growing.new for growing in batch}
        # Ranks of one replica know the same.
        speaks = layout.tensor_rank == 0 and layout.is_last_stage
        everywhere: list[tuple[dict[int, list[int]], float]] = [({}, 0.0)] * layout.world_size
        dist.all_gather_object(everywhere, (own, flops if speaks else 0.0))
        found = {number: new for part, _ in everywhere for number, new in part.items()}
        return Generated(
            tokens=[found[number] for number in range(len(prompts))],
            flops=sum(each for _, each in everywhere),
        )

    def _batches(self, prompts: Sequence[Prompt]) -> Iterator[list[Growing]]:
        """Prompts of like lengths, longest first, with room for what is to be generated."""
        growing = [Growing(n, prompt, self._cut(prompt)) for n, prompt in enumerate(prompts)]
        batch: list[Growing] = []
        widest = 0
        for each in sorted(growing, key=lambda g: -len(g.tokens)):
            width = max(widest, len(each.tokens) + each.prompt.max_new_tokens)
            if batch and (len(batch) + 1) * width > self.scorer.tokens_at_once:
                yield batch
                batch, width = [], len(each.tokens) + each.prompt.max_new_tokens
            batch.append(each)
            widest = width
        if batch:
            yield batch

    def _cut(self, prompt: Prompt) -> list[int]:
        room = self.scorer.max_length - prompt.max_new_tokens
        assert room > 0
        return [int(token) for token in prompt.context[-room:]]

    def _continue(self, batch: Sequence[Growing]) -> float:
        """Generate for one batch on the ranks of one replica; forward FLOPs."""
        shape = self.scorer.reader.shape
        flops = 0.0
        left = [g for g in batch if not g.ends(self.eod_id, self.decode)]
        while left:
            width = max(len(growing.tokens) for growing in left)
            for growing, token in zip(left, self._next_tokens(left, width), strict=True):
                growing.tokens.append(token)
                growing.new.append(token)
            positions = len(left) * width
            # The output layer reads one state a sequence.
            unread = (positions - len(left)) * head_forward_flops(shape)
            flops += forward_flops(shape, positions, width) - unread
            left = [g for g in left if not g.ends(self.eod_id, self.decode)]
        return flops

    def _next_tokens(self, batch: Sequence[Growing], width: int) -> list[int]:
        """The likeliest token after each sequence, on every rank of the replica."""
        layout = self.scorer.reader.layout
        width = min(padded_length(width, length_multiple(layout)), self.scorer.max_length)
        tokens = np.zeros((len(batch), width), np.int64)
        for growing, row in zip(batch, tokens, strict=True):
            row[: len(growing.tokens)] = growing.tokens
        on_device = to_device(torch.from_numpy(tokens), layout.device)
        positions = torch.arange(width, device=layout.device).expand_as(on_device)
        hidden = self.scorer.reader.final_hidden_states(on_device, positions)
        found = torch.zeros(len(batch), dtype=torch.int64, device=layout.device)
        if hidden is not None:
            last = to_device(torch.tensor([len(g.tokens) - 1 for g in batch]), layout.device)
            states = hidden[last, torch.arange(len(batch), device=layout.device)]
            output = self.scorer.output_weights()
            found = likeliest(output, output.logits(states))
        if layout.pipeline_size > 1:
            last_stage = parallel_state.get_pipeline_model_parallel_last_rank()
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(found, src=last_stage, group=group)
        tokens_found: list[int] = found.tolist()
        return tokens_found
