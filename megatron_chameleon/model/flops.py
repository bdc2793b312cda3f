"""FLOPs counted from shapes, the paper's FLOP counts, and model FLOPs utilization.

Counted from shapes: a product of [m, k] by [k, n] counts 2*m*k*n. Causal attention counts the half
of the scores that is used. The output layer counts with the unpadded vocabulary; embedding lookups,
norms, activations and the optimizer do not count (under 1% together). A backward pass counts twice
its forward pass.

The paper (Chameleon, ICML 2025) counts 6 N D for training and 2 N D for a forward pass. N excludes
the embeddings and the output layer; for the proxy called 82M, which has six layers, the paper uses
the N of twelve layers, 12 x 12 x 768^2. Its figures follow from this rule (see
tests/unit/model/test_flops.py), except RegMix's 3.5e18 for the Pile. The paper excludes attention
scores, the output layer (86% of a 1M proxy), and the forward passes of DoReMi's reference. Neither
count includes inner products of gradients, regressions, or the hyperparameter search. A mixture
stores both: the paper's count for comparison with its tables, the count from shapes as the cost.
"""

from __future__ import annotations

from megatron_chameleon.model.sizes import ModelShape, ModelSize, model_size, name_of

BACKWARD_OVER_FORWARD = 2
TRAINING, FORWARD = 6, 2
"""The paper's FLOPs per parameter and token."""

# Dense bf16 tensor-core FLOP/s by device name. NVIDIA's data sheets give twice as much, for sparse
# matrices. The PCIe and NVL variants are slower than these SXM ones: the whole name has to match.
DENSE_BF16_PEAK: dict[str, float] = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}

# The paper's N where it differs from 12 L h^2 of the trained size.
PRINTED_PARAMETERS = {"82m": 12 * 12 * 768**2, "1m": 1_000_000}


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


def model_flops_utilization(
    flops_per_token: float, tokens_per_second: float, peak: float | None
) -> float | None:
    """Model FLOP/s over the device's peak: Chowdhery et al. 2022, "PaLM", appendix B.

    Args:
        flops_per_token: forward and backward, without recomputation and padding.
        tokens_per_second: per device.
        peak: FLOP/s of that device, or None if unknown.

    Returns:
        A fraction from 0 to 1, or None without a peak.
    """
    return None if peak is None else flops_per_token * tokens_per_second / peak


def paper_parameters(size: str | ModelSize) -> int:
    """Return the paper's N of a proxy: 12 L h^2, or as printed for its own sizes.

    Raises:
        UserError: for an unknown name.
    """
    shape = model_size(size) if isinstance(size, str) else size
    printed = PRINTED_PARAMETERS.get(name_of(shape) or "")
    return printed or 12 * shape.num_layers * shape.hidden_size**2


def paper_flops(
    size: str | ModelSize, *, trained_tokens: int = 0, embedded_tokens: int = 0
) -> float:
    """FLOPs of a mixture by the paper's rule, for ``parameters["paper_flops"]``.

    A mixture made with models of several sizes costs the sum over the sizes.

    Args:
        size: size of the trained models, or its name.
        trained_tokens: steps x batch x sequence, summed over the trained models.
        embedded_tokens: tokens of all windows that a proxy embeds.
    """
    per_parameter = TRAINING * trained_tokens + FORWARD * embedded_tokens
    return float(paper_parameters(size)) * per_parameter
