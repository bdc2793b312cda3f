"""Compare FLOPs by formula with torch's counts, and FLOPs by the paper's rule with its figures."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_chameleon.model.flops import (
    forward_flops,
    head_forward_flops,
    layer_forward_flops,
    paper_flops,
    training_flops,
)
from megatron_chameleon.model.gpt import build_model
from tests.families import LENGTH, VARIANTS

BATCH = 2
TOKENS = BATCH * LENGTH


def by_operator(counter):
    return {str(name).split(".")[-1]: n for name, n in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_by_formula_equal_the_products_counted_by_torch(one_rank, name):
    # The formula does not count padding, so the vocabulary has 256 tokens, which need no padding.
    config = dataclasses.replace(VARIANTS[name], vocab_size=256)
    model = build_model(config, one_rank, seed=0)
    tokens = torch.arange(TOKENS).view(BATCH, LENGTH) % 256
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    # FlopCounterMode does not count the fused CPU kernel, so attention uses plain matrix products.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            loss = model(tokens, positions, None, labels=tokens).mean()
        forward = by_operator(counter)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        backward = by_operator(counter)
    # Attention computes scores and weighted sums over all positions, per token and layer. The
    # causal mask uses half of them.
    attention = 2 * (2 * LENGTH * config.query_size)
    layers, of_a_layer = config.num_layers, layer_forward_flops(config, LENGTH)
    assert of_a_layer - layer_forward_flops(config, 0) == attention / 2
    assert forward["bmm"] == TOKENS * layers * attention
    products = forward["mm"] + forward.get("addmm", 0)
    per_token = layers * (of_a_layer - attention / 2) + head_forward_flops(config)
    assert products == TOKENS * per_token
    # A backward pass costs two forward passes.
    assert backward["mm"] == 2 * products
    assert backward["bmm"] == 2 * forward["bmm"]
    trained = training_flops(config, TOKENS, LENGTH)
    assert trained == 3 * forward_flops(config, TOKENS, LENGTH)
    counted = sum(forward.values()) + sum(backward.values())
    assert trained == counted - 3 * forward["bmm"] / 2


# Tokens of a proxy of 10,000 steps on SlimPajama.
LONG_PROXY = 10_000 * 128 * 1024


@pytest.mark.parametrize(
    ("size", "trained", "printed"),
    [  # FLOPs printed under the paper's perplexity tables
        ("82m", 2 * LONG_PROXY, 1.34e18),  # DoReMi: the reference and the proxy
        ("82m", LONG_PROXY, 6.68e17),  # DoGE
        ("regmix-1m", 200 * 10**9, 1.20e18),  # RegMix: 200 proxies
        # A size that is not in the paper follows the paper's rule.
        ("mini", 1000, 6 * (12 * 6 * 256**2) * 1000),
    ],
)
def test_the_papers_rule_yields_the_papers_totals(size, trained, printed):
    flops = paper_flops(size, trained_tokens=trained)
    assert float(f"{flops:.2e}") == float(f"{printed:.2e}")
    assert paper_flops(size, embedded_tokens=trained) == pytest.approx(flops / 3)
