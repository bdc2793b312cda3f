"""Count FLOPs from shapes and by the paper's rule, and compute model FLOPs utilization.

Counted from shapes: a product of [m, k] by [k, n] counts 2*m*k*n. For causal attention, only the
half of the scores that is used is counted. For the output layer, the vocabulary is counted without
padding. Embedding lookups, norms, activations and the optimizer are not counted (under 1%
together). A backward pass counts as two forward passes.

The paper (Chameleon, ICML 2025) counts 6 N D for training and 2 N D for a forward pass. N excludes
the embeddings and the output layer. The paper states neither N nor the sequence length S for its
82M proxy, and its totals determine only the product N S B with the batch size B. For 10,000 steps,
the printed 6.68e17 is 60,000 N S B in each of these cases:

- N of twelve layers, 12 x 12 x 768^2, with S = 1024 and B = 128;
- N of the proxy's six layers, with (S, B) = (2048, 128), (1024, 256) or (512, 512).

This module uses the N of the first case, so that ``paper_flops`` with S = 1024 and B = 128 equals
the paper's totals for DoReMi, DoGE and mixing laws. RegMix's 1.20e18 is 200 proxies of 10^9 tokens
with N = 10^6; its 3.5e18 for the Pile does not follow from the rule. The paper does not state the
length of Chameleon's windows: with the 512 tokens of the authors' code, its 1.36e17 for SlimPajama
follows, but not its 4.62e15 for the Pile. The DoGE of this project counts more than the paper, by
the held-out samples of its target.

The rule excludes attention scores, the output layer (most of a 1M proxy), and the forward passes of
DoReMi's reference. Neither count includes inner products of gradients, regressions, or the
hyperparameter search. A mixture stores both counts: the paper's count for comparison with the
paper's tables, and the count from shapes as the cost.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.model.config import ModelConfig, name_of, preset
from megatron_chameleon.parallel.options import RecomputeOptions

BACKWARD_OVER_FORWARD = 2
TRAINING, FORWARD = 6, 2
"""FLOPs per parameter and token by the paper's rule."""

# Dense bf16 tensor-core FLOP/s by device name; NVIDIA's data sheets print twice as much, for sparse
# matrices. The PCIe and NVL variants are slower than these SXM devices, so the whole name must
# match.
DENSE_BF16_PEAK: dict[str, float] = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}

# N of the paper's totals, for models where it differs from the layers' matrices; the N of 82m is
# inferred, see above.
PRINTED_PARAMETERS = {"82m": 12 * 12 * 768**2, "regmix-1m": 1_000_000}


def layer_forward_flops(config: ModelConfig, seq_length: int) -> float:
    """Count a layer's forward FLOPs per token, in windows of ``seq_length`` tokens."""
    causal_attention = 2 * (2 * seq_length * config.query_size) / 2
    return 2 * config.layer_matrix_parameters + causal_attention


def head_forward_flops(config: ModelConfig) -> float:
    """Count forward FLOPs per token of the output layer."""
    return 2.0 * config.hidden_size * config.vocab_size


def forward_flops(config: ModelConfig, tokens: int, seq_length: int) -> float:
    """Count forward FLOPs of the whole model on ``tokens`` tokens."""
    layers = config.num_layers * layer_forward_flops(config, seq_length)
    return tokens * (layers + head_forward_flops(config))


def training_flops(config: ModelConfig, tokens: int, seq_length: int) -> float:
    """Count forward and backward FLOPs on ``tokens`` tokens, without recomputed activations."""
    return (1 + BACKWARD_OVER_FORWARD) * forward_flops(config, tokens, seq_length)


def recomputed_flops(
    config: ModelConfig,
    recompute: RecomputeOptions,
    tokens: int,
    seq_length: int,
    num_chunks: int = 1,
) -> float:
    """Count the FLOPs of forward passes that ``recompute`` repeats in the backward pass.

    Args:
        config: the model.
        recompute: recomputed activations.
        tokens: number of tokens.
        seq_length: tokens per sequence.
        num_chunks: number of pipeline stages, virtual stages included.
    """
    if recompute.recompute_granularity == "selective":  # both products of the MLP
        products = config.hidden_size * (config.fc1_size + config.ffn_hidden_size)
        return 2.0 * tokens * config.num_layers * products
    if recompute.recompute_granularity is None:
        return 0.0
    is_block = recompute.recompute_method == "block"
    layers = recompute.unit * num_chunks if is_block else config.num_layers
    return tokens * layers * layer_forward_flops(config, seq_length)


def embedding_flops(config: ModelConfig, layer: int, tokens: int, seq_length: int) -> float:
    """Count forward FLOPs of the first ``layer`` layers, without the output layer."""
    return tokens * layer * layer_forward_flops(config, seq_length)


def model_flops_utilization(
    flops_per_token: float, tokens_per_second: float, peak: float | None
) -> float | None:
    """Divide model FLOP/s by the device's peak (Chowdhery et al. 2022, "PaLM", appendix B).

    Args:
        flops_per_token: forward and backward, without recomputation and padding.
        tokens_per_second: per device.
        peak: peak FLOP/s of the device, or None if unknown.

    Returns:
        Model FLOPs utilization, a fraction from 0 to 1; None if ``peak`` is None.
    """
    return None if peak is None else flops_per_token * tokens_per_second / peak


def paper_parameters(model: str | ModelConfig) -> int:
    """Return a proxy's parameter count N: that of the paper's totals, or that of its matrices.

    The matrices of the paper's models have 12 L h^2 elements, without embeddings.

    Raises:
        UserError: for an unknown name.
    """
    # Neither vocabulary nor sequence length changes the matrices of the layers.
    config = preset(model, 0, 0) if isinstance(model, str) else model
    named = config  # a preset with --openai-gelu has the same matrices
    if config.activation == "gelu_tanh":
        named = dataclasses.replace(config, activation="gelu")
    printed = PRINTED_PARAMETERS.get(name_of(named) or "")
    return printed or config.num_layers * config.layer_matrix_parameters


def paper_flops(
    model: str | ModelConfig, *, trained_tokens: int = 0, embedded_tokens: int = 0
) -> float:
    """Count FLOPs of a mixture by the paper's rule, for ``parameters["paper_flops"]``.

    The cost of a mixture made with models of several sizes is the sum over the sizes.

    Args:
        model: the trained models, or their name.
        trained_tokens: steps x batch size x sequence length, summed over the trained models.
        embedded_tokens: number of tokens in all windows that a proxy embeds.
    """
    per_parameter = TRAINING * trained_tokens + FORWARD * embedded_tokens
    return float(paper_parameters(model)) * per_parameter
