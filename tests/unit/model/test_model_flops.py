"""FLOPs by formula against those that torch counts while a real model runs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_chameleon.model.flops import (
    embedding_flops,
    forward_flops,
    head_forward_flops,
    layer_forward_flops,
    training_flops,
)
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.sizes import ModelShape, ModelSize, model_size

BATCH, LENGTH = 2, 48
# 256 rows of the embedding need no padding, which the formula leaves out.
SHAPE = ModelShape(ModelSize(3, 4, 64, 160), vocab_size=256, max_sequence_length=LENGTH)
TOKENS = BATCH * LENGTH


@pytest.fixture(scope="module")
def counted(one_rank):
    """FLOPs that torch counts by operator: [forward, backward]."""
    model = build_model(SHAPE, one_rank, seed=0)
    tokens = torch.arange(TOKENS).view(BATCH, LENGTH) % 256
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    counts = []
    # The fused CPU kernel is not counted; the plain one multiplies the same matrices.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            loss = model(tokens, positions, None, labels=tokens).mean()
        counts.append(by_operator(counter))
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        counts.append(by_operator(counter))
    return counts


def by_operator(counter):
    return {str(name).split(".")[-1]: n for name, n in counter.get_flop_counts()["Global"].items()}


def attention(shape, length):
    """Per token and layer: scores and weighted sum over all positions, later ones included."""
    return 2 * (2 * length * shape.size.hidden_size)


def test_matrix_products_are_those_that_torch_counts(counted):
    forward = counted[0]
    products = forward["mm"] + forward.get("addmm", 0)
    without_attention = SHAPE.size.num_layers * (
        layer_forward_flops(SHAPE, LENGTH) - attention(SHAPE, LENGTH) / 2
    )
    assert products == TOKENS * (without_attention + head_forward_flops(SHAPE))


def test_causal_attention_counts_the_half_of_the_scores_that_is_used(counted):
    all_scores = counted[0]["bmm"]
    assert all_scores == TOKENS * SHAPE.size.num_layers * attention(SHAPE, LENGTH)
    counted_here = layer_forward_flops(SHAPE, LENGTH) - layer_forward_flops(SHAPE, 0)
    assert counted_here == attention(SHAPE, LENGTH) / 2


def test_a_backward_pass_costs_two_forward_passes(counted):
    forward, backward = counted
    assert backward["mm"] == 2 * (forward["mm"] + forward.get("addmm", 0))
    assert backward["bmm"] == 2 * forward["bmm"]
    trained = training_flops(SHAPE, TOKENS, LENGTH)
    assert trained == 3 * forward_flops(SHAPE, TOKENS, LENGTH)
    assert trained == sum(sum(part.values()) for part in counted) - 3 * forward["bmm"] / 2


def test_embedding_pays_for_its_layers_only():
    whole = forward_flops(SHAPE, 1000, LENGTH)
    layers = embedding_flops(SHAPE, 3, 1000, LENGTH)
    assert whole - layers == 1000 * head_forward_flops(SHAPE)
    assert embedding_flops(SHAPE, 1, 1000, LENGTH) == layers / 3


def test_large_models_near_the_rule_of_six_flops_per_parameter_and_token():
    shape = ModelShape(model_size("1.2b"), 50_257, 1024)
    per_token = training_flops(shape, 1, 1024)
    assert 1.0 < per_token / (6 * shape.num_parameters) < 1.1
