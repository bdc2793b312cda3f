"""A stack of models computes what each of them computes by itself."""

from __future__ import annotations

import pytest
import torch

from megatron_chameleon.methods.swarm import head
from megatron_chameleon.methods.swarm.head import losses_and_gradients, losses_of, plain_losses
from megatron_chameleon.methods.swarm.stacked_gpt import StackedGPT, initial_weights
from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.model.initialization import WORD_EMBEDDINGS
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from tests.kernel_checks import interpreted

VOCAB, LENGTH, ROWS = 251, 16, 3
SEEDS = (11, 12, 99)
SHAPES = {
    "two layers": ModelShape(ModelSize(2, 4, 32, 64), VOCAB, LENGTH),
    "a wide one": ModelShape(ModelSize(1, 2, 48, 192), VOCAB, LENGTH),
}
CPU = torch.device("cpu")


@pytest.fixture(params=SHAPES, ids=lambda name: name.replace(" ", "-"))
def shape(request):
    return SHAPES[request.param]


@pytest.fixture
def batch():
    drawn = torch.randint(VOCAB, (len(SEEDS), ROWS, LENGTH + 1), generator=generator(0))
    return drawn[..., :-1], drawn[..., 1:]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def models_alone(shape, layout, *, bf16=False):
    """A GPTModel of each seed, moved away from its initial weights, whose biases are zero."""
    found = []
    for seed in SEEDS:
        model = build_model(shape, layout, seed)
        with torch.no_grad():
            for parameter in unwrap(model).parameters():
                noise = torch.randn(parameter.shape, generator=generator(seed))
                parameter.add_(0.05 * noise)
        found.append(model)
    return found


def stack_of(models):
    names = [name for name, _ in models[0].named_parameters()]
    parameters = [dict(model.named_parameters()) for model in models]
    return {name: torch.stack([p[name].detach() for p in parameters]) for name in names}


def gradient_of(stacked, name):
    gradient = stacked.weights[name].grad
    assert gradient is not None
    return gradient


def losses_alone(model, tokens, labels):
    positions = torch.arange(LENGTH).expand(tokens.shape)
    return model(tokens, positions, None, labels=labels)


def test_a_stack_begins_with_the_weights_that_each_member_would_begin_with(one_rank, shape):
    stack = initial_weights(shape, SEEDS, CPU)
    alone = stack_of([build_model(shape, one_rank, seed) for seed in SEEDS])
    assert list(stack) == list(alone)
    for name, tensor in alone.items():
        assert torch.equal(stack[name], tensor), name


def test_losses_and_gradients_are_those_of_each_model_alone(one_rank, shape, batch):
    tokens, labels = batch
    models = models_alone(shape, one_rank)
    stacked = StackedGPT(shape, stack_of(models), bf16=False)
    scale = 1 / tokens[0].numel()
    sums = stacked.forward_backward(tokens, labels, scale)
    for member, model in enumerate(models):
        losses = losses_alone(model, tokens[member], labels[member])
        (losses.sum() * scale).backward()
        assert sums[member].item() == pytest.approx(losses.sum().item(), abs=1e-5 * losses.numel())
        for name, parameter in model.named_parameters():
            gradient = gradient_of(stacked, name)[member]
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_gradients_of_several_passes_add_up(shape, batch):
    tokens, labels = batch
    weights = initial_weights(shape, SEEDS, CPU)
    whole, parts = (StackedGPT(shape, weights, bf16=False) for _ in range(2))
    whole.forward_backward(tokens, labels, 1.0)
    for row in range(ROWS):
        part = slice(row, row + 1)
        parts.forward_backward(tokens[:, part], labels[:, part], 1.0)
    for name, parameter in whole.weights.items():
        torch.testing.assert_close(
            gradient_of(parts, name), parameter.grad, rtol=1e-4, atol=1e-4, msg=name
        )
    parts.begin_step()
    assert not any(gradient_of(parts, name).any() for name in parts.weights)


def test_held_out_losses_are_the_same_and_all_members_may_read_one_batch(one_rank, shape, batch):
    tokens, labels = batch[0][:1], batch[1][:1]
    models = models_alone(shape, one_rank)
    stacked = StackedGPT(shape, stack_of(models), bf16=False)
    found = stacked.token_losses(tokens, labels)
    assert found.shape == (len(SEEDS), ROWS, LENGTH)
    for member, model in enumerate(models):
        alone = losses_alone(model, tokens[0], labels[0])
        torch.testing.assert_close(found[member], alone, rtol=0, atol=1e-5)


def test_bfloat16_is_near_and_sums_gradients_in_float32(one_rank, shape, batch):
    weights = stack_of(models_alone(shape, one_rank))
    exact, rounded = (StackedGPT(shape, weights, bf16=bf16) for bf16 in (False, True))
    scale = 1 / batch[0][0].numel()
    sums = exact.forward_backward(batch[0], batch[1], scale)
    torch.testing.assert_close(
        rounded.forward_backward(batch[0], batch[1], scale), sums, rtol=5e-3, atol=0
    )
    for name in exact.weights:
        gradient, expected = gradient_of(rounded, name), gradient_of(exact, name)
        assert gradient.dtype == torch.float32
        error = (gradient - expected).norm() / expected.norm()
        assert error < 0.03, name


def test_a_member_that_is_no_number_spoils_no_other(shape, batch):
    weights = initial_weights(shape, SEEDS, CPU)
    well, spoilt = (StackedGPT(shape, weights, bf16=False) for _ in range(2))
    with torch.no_grad():
        spoilt.weights["decoder.layers.0.mlp.linear_fc1.weight"][1, 0, 0] = float("nan")
    expected, found = (model.forward_backward(batch[0], batch[1], 1.0) for model in (well, spoilt))
    assert found[1].isnan()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    for name in well.weights:
        assert torch.equal(gradient_of(spoilt, name)[[0, 2]], gradient_of(well, name)[[0, 2]]), name


@pytest.mark.parametrize("elements", [1, 256, 3 * 256, 5 * 256, 7 * 256, 15 * 256, 1 << 20])
@pytest.mark.parametrize("vocab_size", [200, 256])
def test_the_head_in_pieces_is_the_plain_one(monkeypatch, elements, vocab_size):
    monkeypatch.setattr(head, "PIECE_ON_CPU", elements)
    hidden = torch.randn(3, 5, 8, generator=generator(1))
    weight = torch.randn(3, 256, 8, generator=generator(2))
    labels = torch.randint(vocab_size, (3, 5), generator=generator(3))
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = plain_losses(x, w, labels, vocab_size)
    (0.25 * expected.sum()).backward()
    before = torch.randn(weight.shape, generator=generator(4))
    of_weight = before.clone()
    losses, of_hidden = losses_and_gradients(hidden, weight, labels, vocab_size, 0.25, of_weight)
    torch.testing.assert_close(losses, expected.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(of_hidden, x.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(of_weight - before, w.grad, rtol=0, atol=1e-5)
    assert torch.equal(losses_of(hidden, weight, labels, vocab_size), losses)


def test_the_shapes_of_a_stack_count_the_parameters_of_its_members(shape):
    stack = initial_weights(shape, SEEDS[:1], CPU)
    padding = stack[WORD_EMBEDDINGS].size(1) - shape.vocab_size
    held = sum(tensor.numel() for tensor in stack.values())
    assert held == shape.num_parameters + padding * shape.size.hidden_size


def test_the_head_goes_through_the_kernels_of_a_gpu_in_tritons_interpreter():
    pytest.importorskip("triton")
    checked = interpreted("tests.unit.methods.swarm_kernel_checks")
    assert len(checked) == 6
    assert max(error for name, error in checked.items() if "float32" in name) < 2e-5
    assert max(checked.values()) < 0.1  # bfloat16 has 8 bits, and losses are about 10
