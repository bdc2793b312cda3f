"""Log-probabilities of tokens, from hidden states and this rank's part of the output weights.

Logits are computed for the places alone that predict something, a few at a time: for the whole of a
context they would take as long as the layers of a small model.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch.nn.functional import linear

# Logits that are there at a time; those of a CPU are not to take up its memory bandwidth.
ELEMENTS_ON_CPU, ELEMENTS_ON_GPU = 1 << 23, 1 << 28


@dataclasses.dataclass(frozen=True)
class OutputWeights:
    """This rank's part of the output layer.

    Attributes:
        weight: [v, h], the rows of the tokens from ``first`` on.
        first: the first token.
        vocab_size: real tokens over all ranks; rows from there on only pad.
        group: the ranks that share the vocabulary; None for one alone.
    """

    weight: torch.Tensor
    first: int
    vocab_size: int
    group: dist.ProcessGroup | None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, v] float32 for ``hidden`` [n, h]; minus infinity where rows only pad."""
        logits = linear(hidden, self.weight).float()
        logits[:, max(self.vocab_size - self.first, 0) :] = -torch.inf
        return logits

    def rows_at_once(self) -> int:
        """How many rows of logits are computed at a time."""
        elements = ELEMENTS_ON_GPU if self.weight.is_cuda else ELEMENTS_ON_CPU
        return max(1, elements // self.weight.size(0))


def score_labels(
    output: OutputWeights, hidden: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How likely tokens are, and which of them are the likeliest.

    Args:
        output: this rank's part; all ranks of its group call this with the same arguments.
        hidden: [n, h] states after the final layer norm.
        rows: [m] int64: which of them predicts each label.
        labels: [m] int64.

    Returns:
        log-probabilities [m] float32, in nats; and [m] bool, whether the label is the likeliest
        token, the first of them if several are.
    """
    log_probabilities = torch.zeros(len(rows), device=hidden.device)
    is_likeliest = torch.zeros(len(rows), dtype=torch.bool, device=hidden.device)
    step = output.rows_at_once()
    for start in range(0, len(hidden), step):
        logits = output.logits(hidden[start : start + step])
        # All labels at every chunk: to select the chunk's own, the host would wait for the device.
        is_own = (rows >= start) & (rows < start + step)
        own_rows = (rows - start).clamp(0, len(logits) - 1)
        scores = _of_labels(output, logits, own_rows, labels)
        scores -= _denominators(output, logits)[own_rows]
        log_probabilities = torch.where(is_own, scores, log_probabilities)
        is_likeliest |= is_own & (likeliest(output, logits)[own_rows] == labels)
    return log_probabilities, is_likeliest


def likeliest(output: OutputWeights, logits: torch.Tensor) -> torch.Tensor:
    """The token with the largest of ``logits`` [n, v], the first if there are several; [n] int64.

    Over all ranks of the group; they call this together.
    """
    own = logits.argmax(dim=1)
    if output.group is None:
        return own
    largest = _gathered(output.group, logits.gather(1, own[:, None])[:, 0])
    tokens = _gathered(output.group, own + output.first)
    return tokens.gather(0, largest.argmax(dim=0)[None])[0]


def _denominators(output: OutputWeights, logits: torch.Tensor) -> torch.Tensor:
    """The logarithm of the softmax's denominator over the whole vocabulary, [n]."""
    own = logits.logsumexp(dim=1)
    return own if output.group is None else _gathered(output.group, own).logsumexp(dim=0)


def _of_labels(
    output: OutputWeights, logits: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """The logits of ``labels`` [m] in ``rows`` [m]: the rank that has one tells the others."""
    columns = labels - output.first
    is_own = (columns >= 0) & (columns < logits.size(1))
    found = logits[rows, columns.clamp(0, logits.size(1) - 1)]
    found = torch.where(is_own, found, 0.0)
    if output.group is not None:
        dist.all_reduce(found, group=output.group)
    return found


def _gathered(group: dist.ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """[ranks, n] of what each rank has in ``values`` [n], in the order of ranks."""
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.stack(parts)
