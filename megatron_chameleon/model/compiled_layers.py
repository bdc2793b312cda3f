"""torch.compile of the transformer layers.

Each layer is one graph, and all layers of a rank share its code. Biases, GELU, residual additions
and layer norms then fuse into few kernels, between matrix products that stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear

from megatron_chameleon.errors import UserError
from megatron_chameleon.options.parallel import TrainingParallelOptions
from megatron_chameleon.parallel.triton_probe import triton_problem


class GroupedRowParallelLinear(RowParallelLinear):
    """megatron's, which gives its product the group that it has.

    megatron's gives None, and then warns that None is deprecated; the compiler cannot trace a
    warning, and would cut every layer in three.
    """

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **more: Any) -> torch.Tensor:
        more["tp_group"] = self.tp_group
        output: torch.Tensor = super()._forward_impl(input, weight, **more)
        return output


def check_compile(parallel: TrainingParallelOptions) -> None:
    """Refuse to compile where it would fail or do nothing.

    Raises:
        UserError: saying what to leave out.
    """
    if not torch.cuda.is_available():
        raise UserError("--compile-layers needs a CUDA device, and there is none; leave it out")
    problem = triton_problem()
    if problem is not None:
        raise UserError(f"--compile-layers: {problem}; or leave it out")
    if parallel.overlap_param_gather:
        raise UserError(
            "--compile-layers and --overlap-param-gather exclude each other: parameters that "
            "arrive within a layer cannot be compiled; leave out one of them"
        )


def compile_layers(model: GPTModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each layer's forward pass when it is first called, and its backward pass with it.

    Hooks on a layer stay outside of what is compiled. Shapes are those of the first call: another
    micro-batch size or sequence length compiles anew.
    """
    for layer in model.decoder.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)
