"""Cross entropy that holds no second copy of the logits, whole or split over the vocabulary.

Logits are by far the largest activation of a small model: at 16,384 tokens and a vocabulary of
50,304 they take 1.6 GB in bfloat16, and a softmax in float32 with its gradient 6.6 GB more. Here
the forward pass keeps one number a token, the logarithm of the softmax's denominator, and the
backward pass writes the gradient over the logits. What is computed in float32 is a few rows at a
time, on the CPU in its cache; on a GPU a Triton kernel reads each logit once each way.

    loss[t] = logsumexp(x[t]) - x[t, label[t]]
    dloss[t]/dx[t, i] = exp(x[t, i] - logsumexp(x[t])) - (i == label[t])
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_chameleon.parallel.triton_probe import has_kernels

# Elements of the logits that are in float32 at a time: 4 MiB stay in a core's cache; a GPU without
# Triton wants long kernels.
CHUNK_ON_CPU, CHUNK_ON_GPU = 1 << 20, 1 << 27


def chunked_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Losses of ``labels`` under ``logits``, in float32 whatever the logits are in.

    The gradient takes the logits' place, so nobody else may read them after the backward pass;
    autograd raises if somebody tries to. A backward pass that keeps its graph leaves them alone.

    Args:
        logits: [..., columns], contiguous. Under ``group`` each rank has the columns of its part
            of the vocabulary, equally many, in the order of ranks.
        labels: [...] int64, over the whole vocabulary; one outside of it is not found out, and its
            loss means nothing.
        vocab_size: real columns over all ranks. Those from there on only pad: they take no part in
            the softmax, and their gradient is zero.
        group: tensor-parallel ranks that share the vocabulary; all of them call this.

    Returns:
        [...] in float32, in nats; the same on every rank of ``group``.
    """
    losses: torch.Tensor = _CrossEntropy.apply(logits, labels, vocab_size, group)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        rows = logits.view(-1, logits.size(-1))
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        columns = min(max(vocab_size - rank * rows.size(1), 0), rows.size(1))
        own_labels = labels.flatten() - rank * rows.size(1)  # outside of [0, columns) elsewhere
        denominator = log_sum_exp(rows, columns)
        predicted = _logits_of(rows, own_labels, columns)
        if size > 1:
            denominator, predicted = _over_ranks(denominator, predicted, group)
        ctx.save_for_backward(logits, own_labels, denominator)
        ctx.columns = columns
        return (denominator - predicted).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, own_labels, denominator = ctx.saved_tensors
        rows = logits.view(-1, logits.size(-1))
        # What autograd itself asks before it lets compiled code reuse what was saved.
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        out = torch.empty_like(rows) if is_kept else rows
        scale = of_losses.flatten().float()
        write_gradient(rows, own_labels, denominator, scale, ctx.columns, out)
        # A kernel writes past torch, which could then not tell that saved logits have changed.
        torch.autograd.graph.increment_version(out)
        return out.view_as(logits), None, None, None


def log_sum_exp(rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Logarithm of the summed exponentials of the first ``columns`` columns of ``rows`` [n, v].

    Returns:
        [n] in float32; -inf where ``columns`` is 0.
    """
    if has_kernels(rows):
        from megatron_chameleon.model.cross_entropy_kernels import launch_log_sum_exp

        return launch_log_sum_exp(rows, columns)
    result = rows.new_empty(rows.size(0), dtype=torch.float32)
    for part in _chunks(rows):
        result[part] = rows[part, :columns].float().logsumexp(1)
    return result


def write_gradient(
    rows: torch.Tensor,
    labels: torch.Tensor,
    denominator: torch.Tensor,
    scale: torch.Tensor,
    columns: int,
    out: torch.Tensor,
) -> None:
    """Write ``scale * (softmax - one hot label)`` to ``out``, zero from column ``columns`` on.

    Args:
        rows: [n, v] logits.
        labels: [n] int64; one outside of [0, columns) is another rank's.
        denominator: [n] float32, the logarithm of the softmax's over all ranks.
        scale: [n] float32, the gradient of each row's loss.
        columns: columns that are no padding.
        out: [n, v]; may be ``rows`` itself.
    """
    if has_kernels(rows):
        from megatron_chameleon.model.cross_entropy_kernels import launch_write_gradient

        launch_write_gradient(rows, labels, denominator, scale, columns, out)
        return
    out[:, columns:] = 0
    mine = (labels >= 0) & (labels < columns)
    position = torch.where(mine, labels, 0).unsqueeze(1)  # [n, 1]
    one = -mine.float().unsqueeze(1)
    for part in _chunks(rows):
        if columns == 0:
            break
        # In place where rows are in float32 and are the ones to write to.
        target = out[part, :columns] if out.dtype == torch.float32 else None
        softmax = torch.sub(rows[part, :columns].float(), denominator[part, None], out=target)
        softmax.exp_().scatter_add_(1, position[part], one[part]).mul_(scale[part, None])
        if target is None:
            out[part, :columns] = softmax


def _logits_of(rows: torch.Tensor, labels: torch.Tensor, columns: int) -> torch.Tensor:
    """[n] float32 logits of ``labels``; 0 where another rank has them."""
    mine = (labels >= 0) & (labels < columns)
    logits = rows.gather(1, torch.where(mine, labels, 0).unsqueeze(1)).squeeze(1)
    return torch.where(mine, logits.float(), 0.0)


def _over_ranks(
    denominator: torch.Tensor, predicted: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both over the whole vocabulary, from those over each rank's part of it."""
    largest = denominator.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(denominator - largest).exp(), predicted])
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1]


def _chunks(rows: torch.Tensor) -> Iterator[slice]:
    elements = CHUNK_ON_CPU if rows.device.type == "cpu" else CHUNK_ON_GPU
    height = max(1, elements // rows.size(1))
    return (slice(first, first + height) for first in range(0, rows.size(0), height))
