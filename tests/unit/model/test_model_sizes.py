from __future__ import annotations

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.sizes import SIZES, ModelShape, ModelSize, model_size

GPT2_VOCAB, POSITIONS = 50_257, 1024

# Name: layers, heads, hidden size, feed-forward size, millions of parameters by its name.
PAPER = {
    "60m": (3, 6, 768, 3072, 60),
    "82m": (6, 12, 768, 3072, 82),
    "124m": (12, 12, 768, 3072, 124),
    "210m": (24, 16, 768, 3072, 210),
    "684m": (36, 24, 1200, 4800, 684),
    "1.2b": (36, 25, 1600, 6400, 1200),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_sizes_have_the_papers_dimensions(name):
    assert model_size(name) == ModelSize(*PAPER[name][:4])


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_sizes_have_about_the_parameters_of_their_names(name):
    millions = ModelShape(model_size(name), GPT2_VOCAB, POSITIONS).num_parameters / 1e6
    assert millions == pytest.approx(PAPER[name][4], rel=0.015)


def test_124m_is_gpt2_to_the_last_parameter():
    # The figure that Hugging Face's GPT2LMHeadModel gives for "gpt2".
    assert ModelShape(model_size("124m"), GPT2_VOCAB, POSITIONS).num_parameters == 124_439_808


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_heads_share_the_hidden_size_evenly(size):
    assert size.head_dim * size.num_attention_heads == size.hidden_size
    wider = 2 if size == SIZES["1m"] else 4  # RegMix's
    assert size.ffn_hidden_size == wider * size.hidden_size


@pytest.mark.parametrize("name", ["", "83m", "124M", "nano "])
def test_an_unknown_size_lists_the_names(name):
    with pytest.raises(UserError, match=f"--model-size {name}: there is no such size") as refused:
        model_size(name)
    for known in SIZES:
        assert known in str(refused.value)
