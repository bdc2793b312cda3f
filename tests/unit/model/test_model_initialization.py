from __future__ import annotations

import math

import pytest
import torch

from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.initialization import INIT_STD, global_name, initialize_weights
from megatron_chameleon.model.sizes import ModelShape, ModelSize


def shape_of(num_layers, vocab_size=250):
    return ModelShape(ModelSize(num_layers, 4, 96, 192), vocab_size, max_sequence_length=64)


SHAPE = shape_of(num_layers=4)


@pytest.fixture(scope="module")
def model(one_rank):
    return build_model(SHAPE, one_rank, seed=1)


def matrices(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.dim() == 2}


def test_weights_are_the_same_whenever_they_are_drawn(one_rank, model):
    torch.manual_seed(999)
    again = dict(build_model(SHAPE, one_rank, seed=1).named_parameters())
    assert list(again) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again[name])


def test_drawing_does_not_touch_the_random_state_of_the_process(one_rank):
    model = build_model(SHAPE, one_rank, seed=1)
    before = torch.get_rng_state()
    initialize_weights(model, SHAPE, seed=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_matrix_depends_on_the_seed(one_rank, model):
    other = matrices(build_model(SHAPE, one_rank, seed=2))
    for name, matrix in matrices(model).items():
        assert (matrix == other[name]).float().mean() < 0.05, name  # padding rows are zero in both


def test_no_two_matrices_are_drawn_alike(model):
    starts = [tuple(matrix[0, :8].tolist()) for matrix in matrices(model).values()]
    assert len(set(starts)) == len(starts) == 4 * SHAPE.size.num_layers + 2


@pytest.mark.parametrize("first_layer", [0, 1, 2])
def test_a_layer_starts_alike_in_whatever_stage_it_lies(one_rank, model, first_layer):
    """Two layers of the four, numbered as a pipeline stage would number them."""
    stage = build_model(shape_of(num_layers=2), one_rank, seed=7)
    for place, layer in enumerate(stage.decoder.layers):
        layer.layer_number = first_layer + place + 1
    initialize_weights(stage, SHAPE, seed=1)
    for place, layer in enumerate(stage.decoder.layers):
        whole = dict(model.decoder.layers[first_layer + place].named_parameters())
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, whole[name]), name


def test_names_count_layers_over_all_stages(model):
    assert global_name(model, "decoder.layers.3.mlp.linear_fc1.bias") == (
        "decoder.layers.3.mlp.linear_fc1.bias"
    )
    # The last stage's copy of the tied embedding is drawn as the embedding of the first.
    assert global_name(model, "output_layer.weight") == "embedding.word_embeddings.weight"
    model.decoder.layers[1].layer_number += 10
    try:
        assert global_name(model, "decoder.layers.1.x") == "decoder.layers.11.x"
    finally:
        model.decoder.layers[1].layer_number -= 10


def test_vectors_start_at_zero_and_norms_at_one(model):
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            expected = 1.0 if "layernorm" in name and name.endswith("weight") else 0.0
            assert (parameter == expected).all(), name


def test_matrices_are_normal_with_the_deviation_of_gpt2(model):
    scaled = 0
    for name, matrix in matrices(model).items():
        std = INIT_STD
        if name.endswith(("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")):
            std /= math.sqrt(2 * SHAPE.size.num_layers)
            scaled += 1
        drawn = matrix[: SHAPE.vocab_size] if "word_embeddings" in name else matrix
        error = 5 / math.sqrt(drawn.numel())  # five standard errors
        assert abs(drawn.mean().item()) < std * error, name
        assert abs(drawn.std().item() / std - 1) < error, name
        within = (drawn.abs() < std).double().mean().item()
        assert abs(within - math.erf(1 / math.sqrt(2))) < error, name
    assert scaled == 2 * SHAPE.size.num_layers


def test_rows_that_pad_the_vocabulary_are_zero(one_rank, model):
    rows = model.embedding.word_embeddings.weight
    assert rows.size(0) == 256
    assert (rows[250:] == 0).all()
    # The rows before do not depend on how many there are.
    larger = build_model(shape_of(4, vocab_size=253), one_rank, seed=1)
    assert torch.equal(larger.embedding.word_embeddings.weight[:250], rows[:250])
