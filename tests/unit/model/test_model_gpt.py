from __future__ import annotations

import functools

import pytest
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch.nn.functional import cross_entropy

from megatron_chameleon.errors import UserError
from megatron_chameleon.model import gpt
from megatron_chameleon.model.gpt import (
    build_model,
    check_model_layout,
    padded_vocab_size,
    unwrap,
)
from megatron_chameleon.model.sizes import SIZES, ModelShape, ModelSize, model_size
from megatron_chameleon.options.parallel import ParallelOptions

SMALL = ModelSize(num_layers=2, num_attention_heads=4, hidden_size=32, ffn_hidden_size=48)
VOCAB_SIZE, LENGTH = 250, 24


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(VOCAB_SIZE, (3, LENGTH + 1), generator=generator)


def positions_of(tokens):
    return torch.arange(tokens.size(1)).expand_as(tokens)


def losses_of(model, tokens):
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return model(inputs, positions_of(inputs), None, labels=labels)


@pytest.fixture
def _unfilled(monkeypatch):
    """Tensors are made but never written, so that those of the largest size take no memory."""
    made = gpt.transformer_config

    def without_initialization(*arguments, **more):
        config = made(*arguments, **more)
        config.perform_initialization = False
        return config

    monkeypatch.setattr(gpt, "transformer_config", without_initialization)
    monkeypatch.setattr(gpt, "initialize_weights", lambda *_arguments: None)


@pytest.mark.usefixtures("_unfilled")
@pytest.mark.parametrize("name", SIZES)
def test_the_models_parameters_are_as_many_as_the_shape_says(one_rank, name):
    shape = ModelShape(model_size(name), vocab_size=50_257, max_sequence_length=1024)
    model = build_model(shape, one_rank, seed=0)
    padding_rows = padded_vocab_size(shape.vocab_size, 1) - shape.vocab_size
    held = sum(parameter.numel() for parameter in model.parameters())
    assert held - padding_rows * shape.size.hidden_size == shape.num_parameters
    of_a_layer = sum(p.numel() for p in model.decoder.layers[0].parameters())
    assert of_a_layer == shape.layer_parameters


@pytest.mark.parametrize("vocab_size", [1, 100, 128, 129, 8192, 50_257, 50_304])
@pytest.mark.parametrize("tensor_size", [1, 2, 3, 4, 5, 25])
def test_the_padded_vocabulary_is_the_next_that_ranks_can_share(vocab_size, tensor_size):
    padded = padded_vocab_size(vocab_size, tensor_size)
    works = [n for n in range(vocab_size, padded + 1) if n % 128 == 0 and n % tensor_size == 0]
    assert works == [padded]


def test_padding_takes_no_part_in_the_loss(one_rank, tokens):
    """The loss is that of a plain softmax over the 250 tokens there are, in float64."""
    model = build_model(ModelShape(SMALL, VOCAB_SIZE, LENGTH), one_rank, seed=1)
    rows = model.embedding.word_embeddings.weight
    assert rows.shape == (256, SMALL.hidden_size)
    with torch.no_grad():
        rows[VOCAB_SIZE:] = 100.0  # rows that would take all the probability
    final = []
    model.decoder.register_forward_hook(lambda _m, _i, output: final.append(output))
    losses = losses_of(model, tokens)
    hidden = final[0].detach().double()  # [s, b, h]
    logits = hidden.transpose(0, 1) @ rows.detach()[:VOCAB_SIZE].double().T  # [b, s, v]
    expected = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten().double(), expected, atol=2e-5, rtol=0)
    losses.mean().backward()
    assert torch.isfinite(rows.grad).all()
    assert (rows.grad[VOCAB_SIZE:] == 0).all()
    assert (rows.grad[:VOCAB_SIZE] != 0).any(dim=1).all()


def test_the_loss_and_its_gradient_are_megatrons(one_rank, tokens):
    """Ours against that which megatron uses where the vocabulary is split."""
    model = build_model(ModelShape(SMALL, VOCAB_SIZE, LENGTH), one_rank, seed=1)
    generator = torch.Generator().manual_seed(0)
    drawn = 5 * torch.randn(LENGTH, 3, 256, generator=generator)  # [s, b, v]
    drawn[..., VOCAB_SIZE:] = torch.finfo(torch.float32).min  # padding, as megatron has none
    results = []
    for loss_of in (model.compute_language_model_loss, megatrons_loss(model)):
        logits = drawn.clone().requires_grad_()
        losses = loss_of(tokens[:, 1:].contiguous(), logits * 1.0)
        (gradient,) = torch.autograd.grad((losses * torch.arange(LENGTH)).sum(), logits)
        results.append((losses, gradient))
    for ours, megatrons in zip(*results, strict=True):
        torch.testing.assert_close(ours, megatrons, atol=2e-5, rtol=1e-5)


def megatrons_loss(model):
    return functools.partial(LanguageModule.compute_language_model_loss, model)


def test_a_vocabulary_that_needs_no_padding_is_not_masked(one_rank, tokens):
    model = build_model(ModelShape(SMALL, 256, LENGTH), one_rank, seed=1)
    losses = losses_of(model, torch.full_like(tokens, 255))
    assert (losses < 10).all()


def test_a_later_token_changes_no_earlier_loss(one_rank, tokens):
    model = build_model(ModelShape(SMALL, VOCAB_SIZE, LENGTH), one_rank, seed=1)
    changed = tokens.clone()
    changed[:, 13] = (changed[:, 13] + 1) % VOCAB_SIZE
    before, after = losses_of(model, tokens), losses_of(model, changed)
    # Token 13 is the label of position 12 and the input of position 13.
    assert torch.equal(before[:, :12], after[:, :12])
    assert (before[:, 12:] != after[:, 12:]).all()


def test_the_output_layer_is_the_embedding(one_rank):
    model = build_model(ModelShape(SMALL, VOCAB_SIZE, LENGTH), one_rank, seed=1)
    assert model.shared_embedding_or_output_weight() is model.embedding.word_embeddings.weight
    assert model.output_layer.weight is None


def test_bf16_computes_near_fp32_from_the_same_weights(one_rank, tokens):
    shape = ModelShape(SMALL, VOCAB_SIZE, LENGTH)
    full, half = (build_model(shape, one_rank, seed=1, bf16=bf16) for bf16 in (False, True))
    weights = dict(unwrap(full).named_parameters())
    for name, parameter in unwrap(half).named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, weights[name].to(torch.bfloat16))
    difference = (losses_of(full, tokens) - losses_of(half, tokens).float()).abs()
    assert 0 < difference.max() < 0.1


@pytest.mark.parametrize(
    ("size", "degree", "works"),
    [
        ("1.2b", 2, "1, 5, 25"),
        ("1.2b", 8, "1, 5, 25"),
        ("684m", 5, "1, 2, 3, 4, 6, 8, 12, 24"),
        ("684m", 16, "1, 2, 3, 4, 6, 8, 12, 24"),
        ("82m", 8, "1, 2, 3, 4, 6, 12"),
    ],
)
def test_heads_that_cannot_be_shared_are_told_with_the_degrees_that_work(size, degree, works):
    options = ParallelOptions(tensor_model_parallel_size=degree)
    heads = model_size(size).num_attention_heads
    with pytest.raises(UserError) as refused:
        check_model_layout(model_size(size), options, 1024)
    assert str(refused.value) == (
        f"--tensor-model-parallel-size {degree} does not divide {heads} attention heads; {works} do"
    )
    for works_too in works.split(", "):
        options = ParallelOptions(tensor_model_parallel_size=int(works_too))
        check_model_layout(model_size(size), options, 1024)


def test_layers_that_cannot_be_cut_up_are_told_with_the_degrees_that_work():
    with pytest.raises(UserError, match="8 does not divide 12 layers; 1, 2, 3, 4, 6, 12 do"):
        check_model_layout(
            model_size("124m"), ParallelOptions(pipeline_model_parallel_size=8), 1024
        )


def test_a_sequence_that_cannot_be_split_is_refused():
    options = ParallelOptions(tensor_model_parallel_size=4, sequence_parallel=True)
    check_model_layout(model_size("124m"), options, 1024)
    with pytest.raises(UserError, match=r"1023 tokens are not a multiple of .*-parallel-size 4"):
        check_model_layout(model_size("124m"), options, 1023)


@pytest.mark.parametrize("field", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
@pytest.mark.parametrize("degree", [0, -2])
def test_degrees_below_one_are_refused(field, degree):
    with pytest.raises(UserError, match=f"--{field.replace('_', '-')} {degree}: "):
        check_model_layout(model_size("nano"), ParallelOptions(**{field: degree}), 32)
