"""Compare a reader's hidden states and losses with those of the whole model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.readout import Reader, check_layer, length_batches
from tests.families import FAMILIES


@pytest.fixture(scope="module", params=FAMILIES)
def reader(one_rank, request):
    config = FAMILIES[request.param]
    model = build_model(config, one_rank, seed=3)
    model.eval()
    return Reader(model, config, one_rank)


@pytest.fixture(params=[(3, 32), (2, 1)], ids=str)
def tokens(request):
    return torch.randint(250, request.param, generator=torch.Generator().manual_seed(0))


def positions_of(tokens):
    return torch.arange(tokens.size(1)).expand_as(tokens)


@pytest.mark.parametrize("layer", [1, 2, 4])
def test_hidden_states_equal_the_layers_output_in_the_whole_model(reader, tokens, layer):
    seen = []
    handles = [
        block.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
        for block in reader.model.decoder.layers
    ]
    try:
        hidden = reader.hidden_states(tokens, layer)
        assert len(seen) == layer  # later layers do not run
        seen.clear()
        reader.model(tokens, positions_of(tokens), None)
    finally:
        for handle in handles:
            handle.remove()
    assert hidden.shape == (tokens.size(1), tokens.size(0), reader.config.hidden_size)
    assert not hidden.requires_grad
    assert torch.equal(hidden, seen[layer - 1].detach())


def test_token_losses_are_negative_log_probabilities_of_the_model(reader, tokens):
    labels = tokens.roll(-1, dims=1)
    losses = reader.token_losses(tokens, labels)
    with torch.no_grad():
        logits = reader.model(tokens, positions_of(tokens), None).double()[..., :250]
    probabilities = logits.softmax(-1).gather(-1, labels[..., None])[..., 0]
    assert losses.dtype == torch.float32
    assert not losses.requires_grad
    torch.testing.assert_close(losses.double(), -probabilities.log(), atol=1e-5, rtol=0)


@given(
    st.lists(st.integers(1, 40), max_size=30).map(lambda lengths: sorted(lengths, reverse=True)),
    st.integers(1, 200),
    st.sampled_from([1, 8]),
    st.sampled_from([0.0, 0.5]),
)
def test_batches_are_as_large_as_their_limits_allow(lengths, tokens_at_once, multiple, min_fill):
    end = 0
    for first, last, width in length_batches(lengths, tokens_at_once, multiple, 42, min_fill):
        assert lengths[first] <= width < lengths[first] + multiple
        assert width == 42 or width % multiple == 0

        def fits(stop, first=first, width=width):
            is_filled = lengths[stop - 1] >= min_fill * lengths[first]
            return is_filled and (stop - first) * width <= tokens_at_once

        assert first == end
        assert last == first + 1 or fits(last)
        assert last == len(lengths) or not fits(last + 1)
        end = last
    assert end == len(lengths)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6, 12, 24, 27])
def test_the_default_layer_is_the_middle_of_all_hidden_states(num_layers):
    states = range(num_layers + 1)  # the embedding, then the output of each layer
    assert check_layer(num_layers, None) == states[len(states) // 2]
