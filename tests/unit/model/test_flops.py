"""FLOPs by formula against torch's counts, and the paper's figures by its rule."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_chameleon.model.flops import (
    PAPER,
    PaperSettings,
    forward_flops,
    head_forward_flops,
    layer_forward_flops,
    paper_flops,
    training_flops,
)
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.sizes import ModelShape, ModelSize

BATCH, LENGTH = 2, 48
# The formula counts no padding; 256 rows of the embedding need none.
SHAPE = ModelShape(ModelSize(3, 4, 64, 160), vocab_size=256, max_sequence_length=LENGTH)
TOKENS = BATCH * LENGTH


def by_operator(counter):
    return {str(name).split(".")[-1]: n for name, n in counter.get_flop_counts()["Global"].items()}


def test_formulas_equal_the_products_counted_by_torch(one_rank):
    model = build_model(SHAPE, one_rank, seed=0)
    tokens = torch.arange(TOKENS).view(BATCH, LENGTH) % 256
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    # The fused CPU kernel is not counted; the plain one multiplies the same matrices.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            loss = model(tokens, positions, None, labels=tokens).mean()
        forward = by_operator(counter)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        backward = by_operator(counter)
    # Per token and layer: scores and weighted sums over all positions. Half of them are causal.
    attention = 2 * (2 * LENGTH * SHAPE.size.hidden_size)
    layers, of_a_layer = SHAPE.size.num_layers, layer_forward_flops(SHAPE, LENGTH)
    assert of_a_layer - layer_forward_flops(SHAPE, 0) == attention / 2
    assert forward["bmm"] == TOKENS * layers * attention
    products = forward["mm"] + forward.get("addmm", 0)
    per_token = layers * (of_a_layer - attention / 2) + head_forward_flops(SHAPE)
    assert products == TOKENS * per_token
    # A backward pass costs two forward passes.
    assert backward["mm"] == 2 * products
    assert backward["bmm"] == 2 * forward["bmm"]
    trained = training_flops(SHAPE, TOKENS, LENGTH)
    assert trained == 3 * forward_flops(SHAPE, TOKENS, LENGTH)
    counted = sum(forward.values()) + sum(backward.values())
    assert trained == counted - 3 * forward["bmm"] / 2


# As printed under the paper's table of perplexities, and the ratios to Chameleon in its text.
PRINTED = {"doremi": 1.34e18, "doge": 6.68e17, "chameleon": 1.36e17, "regmix": 1.20e18}
RATIOS = {"doremi": 10, "doge": 5, "chameleon": 1, "regmix": 9, "mixing-laws": 394}


def test_the_rule_gives_the_papers_figures():
    for method, printed in PRINTED.items():
        assert float(f"{paper_flops(method):.2e}") == printed, method
    for method, ratio in RATIOS.items():
        assert round(paper_flops(method) / paper_flops("chameleon")) == ratio, method
    # The paper multiplies its rounded figure for DoReMi by 40.
    assert paper_flops("mixing-laws") == pytest.approx(5.36e19, rel=0.005)
    settings = PaperSettings(embedded_tokens=17 * 4000 * 400)
    assert float(f"{paper_flops('chameleon', settings):.2e}") == 4.62e15


@pytest.mark.parametrize("method", [*PAPER, "mine"])
def test_flops_by_the_papers_rule_for_other_settings(method):
    settings = PaperSettings(model_size="mini", trained_tokens=1000, num_proxies=3)
    parameters = 12 * 6 * 256**2
    trainings = 3 * (2 if method == "doremi" else 1)
    assert paper_flops(method, settings) == 6 * parameters * 1000 * trainings
    if method == "mine":
        with pytest.raises(ValueError, match="mine"):
            paper_flops(method)
