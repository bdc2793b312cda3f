"""Compile the transformer layers with torch.compile.

Each layer is one graph, and all layers of a rank share the compiled code. Biases, GELU, residual
additions and layer norms fuse into few kernels; matrix products are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch.distributed import distributed_c10d

from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.triton_probe import triton_problem


class GroupedRowParallelLinear(RowParallelLinear):
    """megatron's RowParallelLinear, but the product gets its tensor-parallel group as an argument.

    megatron itself passes None, and then warns that None is deprecated. The compiler cannot trace a
    warning and would split every layer into three graphs.
    """

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **more: Any) -> torch.Tensor:
        more["tp_group"] = self.tp_group
        output: torch.Tensor = super()._forward_impl(input, weight, **more)
        return output


class TraceableColumnParallelLinear(ColumnParallelLinear):
    """megatron's ColumnParallelLinear with a product that the compiler can trace.

    megatron overlaps collectives with matrix products. The compiler cannot trace this overlap, so
    the product and its communication are one operation here.
    """

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **more: Any) -> torch.Tensor:
        overlaps = self.allreduce_dgrad or self.sequence_parallel
        if not (torch.compiler.is_compiling() and overlaps):
            plain: torch.Tensor = super()._forward_impl(input, weight, **more)
            return plain
        group: str = self.tp_group.group_name
        output = column_parallel_linear(input, weight, self.sequence_parallel, group)
        return output if more["bias"] is None else output + more["bias"]


@torch.library.custom_op("megatron_chameleon::column_parallel_linear", mutates_args=())
def column_parallel_linear(
    input: torch.Tensor, weight: torch.Tensor, sequence_parallel: bool, group: str
) -> torch.Tensor:
    """Multiply ``input`` by this rank's rows of a weight, as megatron's ColumnParallelLinear does.

    Args:
        input: [s, b, h], this rank's shard of the sequence under sequence parallelism, otherwise
            the whole sequence.
        weight: [n, h].
        sequence_parallel: gather the sequence before the product.
        group: name of the tensor-parallel group.

    Returns:
        [s, b, n] of the whole sequence.
    """
    whole = input
    if sequence_parallel:
        whole, gathering = _gather(input, _group_of(group))
        gathering.wait()
    return whole @ weight.t()


@column_parallel_linear.register_fake
def _(
    input: torch.Tensor, weight: torch.Tensor, sequence_parallel: bool, group: str
) -> torch.Tensor:
    ranks = _group_of(group).size() if sequence_parallel else 1
    return input.new_empty(input.size(0) * ranks, input.size(1), weight.size(0))


@torch.library.custom_op("megatron_chameleon::column_parallel_linear_backward", mutates_args=())
def column_parallel_linear_backward(
    gradient: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    sequence_parallel: bool,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of :func:`column_parallel_linear` with respect to ``input`` and ``weight``.

    The sequence is gathered again while the input's gradient is computed. The input's gradient is
    reduced over the ranks while the weight's gradient is computed.

    Args:
        gradient: gradient of the output, [s, b, n].
        input: as in the forward pass.
        weight: as in the forward pass.
        sequence_parallel: as in the forward pass.
        group: as in the forward pass.
    """
    ranks, whole = _group_of(group), input
    if sequence_parallel:
        whole, gathering = _gather(input, ranks)
    of_whole = gradient @ weight
    of_input = of_whole
    if sequence_parallel:
        gathering.wait()
        of_input = torch.empty_like(input)
        reducing = dist.reduce_scatter_tensor(of_input, of_whole, group=ranks, async_op=True)
    else:
        reducing = dist.all_reduce(of_input, group=ranks, async_op=True)
    of_weight = gradient.flatten(0, 1).t() @ whole.flatten(0, 1)
    reducing.wait()
    return of_input, of_weight


@column_parallel_linear_backward.register_fake
def _(
    gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *_more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(input), torch.empty_like(weight)


def _group_of(name: str) -> dist.ProcessGroup:
    """Look up a process group by name, as torch's functional collectives do."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def _gather(input: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Start to gather the shards of the sequence; return the buffer [s, b, h] and the work."""
    whole = input.new_empty(input.size(0) * group.size(), *input.shape[1:])
    work = dist.all_gather_into_tensor(whole, input.contiguous(), group=group, async_op=True)
    return whole, work


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, weight, ctx.sequence_parallel, ctx.group = inputs
    ctx.save_for_backward(input, weight)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    of_input, of_weight = column_parallel_linear_backward(
        gradient, *ctx.saved_tensors, ctx.sequence_parallel, ctx.group
    )
    return of_input, of_weight, None, None


column_parallel_linear.register_autograd(_backward, setup_context=_save_for_backward)


def check_compile() -> None:
    """Check that layers can be compiled on this machine.

    Raises:
        UserError: if they cannot.
    """
    if not torch.cuda.is_available():
        raise UserError("--compile-layers needs a CUDA device, but none is available; leave it out")
    problem = triton_problem()
    if problem is not None:
        raise UserError(f"--compile-layers: {problem}; or leave it out")


def compile_layers(model: GPTModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the forward and backward pass of each layer when the layer is first called.

    Hooks on a layer are not compiled. A call with another micro-batch size or sequence length
    compiles the layer again.
    """
    for layer in model.decoder.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)
