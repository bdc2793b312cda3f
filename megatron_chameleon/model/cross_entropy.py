"""Cross entropy without a second copy of the logits; the vocabulary may be sharded.

Logits are by far the largest activation of a small model. At 16,384 tokens and a vocabulary of
50,304, logits take 1.6 GB in bfloat16, and a softmax in float32 with its gradient takes 6.6 GB
more. Here the forward pass keeps one number per token, the logarithm of the softmax's denominator,
and the backward pass overwrites the logits with their gradient. The CPU computes in float32 on a
few rows at a time, in its cache; on a GPU a Triton kernel reads each logit once per pass.

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

# Number of logits converted to float32 at a time. On the CPU, 4 MiB fit into the cache of a core.
# On a GPU without Triton, small operations would be inefficient.
CHUNK_ON_CPU, CHUNK_ON_GPU = 1 << 20, 1 << 27


def chunked_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Compute the losses of ``labels`` under ``logits``, in float32 for any dtype of the logits.

    The gradient overwrites the logits, so they cannot be read after the backward pass; autograd
    raises RuntimeError if another operation needs them. A backward pass that retains its graph does
    not overwrite the logits.

    Args:
        logits: [..., columns], contiguous. With ``group``, each rank has its shard of the
            vocabulary; shards have equal sizes and follow the order of ranks.
        labels: [...] int64 ids in the whole vocabulary; a label outside the vocabulary has no
            defined loss.
        vocab_size: number of real columns over all ranks. Further columns are padding: they are
            left out of the softmax, and their gradient is zero.
        group: tensor-parallel ranks that shard the vocabulary. Collective.

    Returns:
        [...] in float32, in nats; equal on all ranks of ``group``.
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
        # Labels that belong to other ranks are outside [0, columns).
        own_labels = labels.flatten() - rank * rows.size(1)
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
        # With retain_graph, another backward pass needs the logits. Code from torch.compile makes
        # the same check before it overwrites saved tensors.
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        out = torch.empty_like(rows) if is_kept else rows
        scale = of_losses.flatten().float()
        write_gradient(rows, own_labels, denominator, scale, ctx.columns, out)
        # torch does not see the writes of a kernel, so it could not detect that saved logits have
        # changed.
        torch.autograd.graph.increment_version(out)
        return out.view_as(logits), None, None, None


def log_sum_exp(rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Compute log(sum(exp(rows[:, :columns]))) of each of ``rows`` [n, v].

    Returns:
        [n] in float32; -inf if ``columns`` is 0.
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
        labels: [n] int64; labels outside [0, columns) belong to other ranks.
        denominator: [n] float32, logarithm of the softmax's denominator over all ranks.
        scale: [n] float32, the gradient of each row's loss.
        columns: number of columns without padding.
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
        # The computation is in place if the output is float32.
        target = out[part, :columns] if out.dtype == torch.float32 else None
        softmax = torch.sub(rows[part, :columns].float(), denominator[part, None], out=target)
        softmax.exp_().scatter_add_(1, position[part], one[part]).mul_(scale[part, None])
        if target is None:
            out[part, :columns] = softmax


def _logits_of(rows: torch.Tensor, labels: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the float32 logits [n] of ``labels``; 0 for labels of other ranks."""
    mine = (labels >= 0) & (labels < columns)
    logits = rows.gather(1, torch.where(mine, labels, 0).unsqueeze(1)).squeeze(1)
    return torch.where(mine, logits.float(), 0.0)


def _over_ranks(
    denominator: torch.Tensor, predicted: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the ranks' denominators and label logits into those of the whole vocabulary."""
    largest = denominator.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(denominator - largest).exp(), predicted])
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1]


def _chunks(rows: torch.Tensor) -> Iterator[slice]:
    elements = CHUNK_ON_CPU if rows.device.type == "cpu" else CHUNK_ON_GPU
    height = max(1, elements // rows.size(1))
    return (slice(first, first + height) for first in range(0, rows.size(0), height))
