"""Floating-point operations, counted from shapes.

A product of [m, k] by [k, n] counts 2*m*k*n. Causal attention counts the half of the scores that is
used. The output layer counts, at the unpadded vocabulary; embeddings look-ups, norms, activations
and the optimizer do not (under 1% together). A backward pass counts twice its forward pass.
"""

from __future__ import annotations

from megatron_chameleon.model.sizes import ModelShape

BACKWARD_OVER_FORWARD = 2


def layer_forward_flops(shape: ModelShape, seq_length: int) -> float:
    """Forward FLOPs per token of one transformer layer, in windows of ``seq_length`` tokens."""
    h, f = shape.size.hidden_size, shape.size.ffn_hidden_size
    projections = 2 * (4 * h * h + 2 * h * f)
    causal_attention = 2 * (2 * seq_length * h) / 2
    return projections + causal_attention


def head_forward_flops(shape: ModelShape) -> float:
    """Forward FLOPs per token of the output layer."""
    return 2.0 * shape.size.hidden_size * shape.vocab_size


def forward_flops(shape: ModelShape, tokens: int, seq_length: int) -> float:
    """Forward FLOPs of the whole model on ``tokens`` tokens."""
    layers = shape.size.num_layers * layer_forward_flops(shape, seq_length)
    return tokens * (layers + head_forward_flops(shape))


def training_flops(shape: ModelShape, tokens: int, seq_length: int) -> float:
    """Forward and backward FLOPs on ``tokens`` tokens; recomputed activations do not count."""
    return (1 + BACKWARD_OVER_FORWARD) * forward_flops(shape, tokens, seq_length)


def embedding_flops(shape: ModelShape, layer: int, tokens: int, seq_length: int) -> float:
    """Forward FLOPs of the first ``layer`` layers, without the output layer."""
    return tokens * layer * layer_forward_flops(shape, seq_length)
