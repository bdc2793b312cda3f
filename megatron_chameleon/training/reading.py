"""The model that is trained, read out between two steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megatron_chameleon.model.gpt import unwrap
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.parallel.layout import Layout


@contextlib.contextmanager
def reading(
    model: Sequence[torch.nn.Module], shape: ModelShape, layout: Layout
) -> Iterator[Reader]:
    """A reader of ``model`` for the block; every rank enters it.

    Weights, gradients and random states are as they were afterwards, and the model is in training
    mode. It computes in the precision that it is trained in.

    Args:
        model: this rank's chunks, wrapped for data parallelism, before the passes of a step.
        shape: of the whole model.
        layout: of the ranks.
    """
    for chunk in model:
        if layout.overlap_param_gather:
            # Otherwise layers would gather as they run, and ranks do not run the same batches.
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
        chunk.eval()
    first, *later = map(unwrap, model)
    try:
        # Compiled layers are for one shape, and would be compiled anew for every other.
        with torch.compiler.set_stance("force_eager"):
            yield Reader(first, shape, layout, later)
    finally:
        for chunk in model:
            chunk.train()
