"""LayerNorm without Apex or Transformer Engine, right under sequence parallelism too."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class SequenceParallelLayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm with its parameters marked as megatron expects.

    Under sequence parallelism each tensor-parallel rank normalises its part of the sequence, so
    the gradients of weight and bias must be summed over those ranks; finalize_model_grads does so
    for parameters whose ``sequence_parallel`` is true. megatron's own torch norm refuses instead.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
