"""GPT model: number of parameters, loss, initial weights and compiled layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy

from megatron_chameleon.errors import UserError
from megatron_chameleon.model import compiled_layers
from megatron_chameleon.model.compiled_layers import check_compile, compile_layers
from megatron_chameleon.model.config import INIT_STD, ModelConfig, preset
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.initialization import initialize_weights
from megatron_chameleon.parallel.layout import seed_dropout
from tests.families import FAMILIES

SMALL = 2, 4, 32, 48
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


def test_vocabulary_padding_is_left_out_of_the_loss(one_rank, tokens):
    """Compare with a plain softmax over the 250 real tokens, in float64."""
    model = build_model(ModelConfig(*SMALL, VOCAB_SIZE, LENGTH), one_rank, seed=1)
    rows = model.embedding.word_embeddings.weight
    assert rows.shape == (256, 32)
    with torch.no_grad():
        rows[VOCAB_SIZE:] = 100.0  # would give real tokens zero probability
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


def test_dropout_is_applied_to_embeddings_and_to_the_outputs_of_attention_and_mlp(one_rank, tokens):
    config, rate = ModelConfig(*SMALL, VOCAB_SIZE, LENGTH), 0.25
    plain = build_model(config, one_rank, seed=1)
    model = build_model(config, one_rank, seed=1, hidden_dropout=rate, attention_dropout=rate)
    expected = losses_of(plain, tokens)
    assert torch.equal(losses_of(model.eval(), tokens), expected)  # no dropout in evaluation mode
    states = []

    def keep(_module, inputs, _output):
        states.append(inputs[0].detach())

    layer, last = model.decoder.layers[0], model.decoder.layers[-1]
    for module in (layer.input_layernorm, layer.pre_mlp_layernorm, last.input_layernorm):
        module.register_forward_hook(keep)
    assert len(model.decoder.layers) == 2
    plain.embedding.register_forward_hook(lambda _m, _i, output: states.append(output.detach()))
    losses_of(plain, tokens)
    seed_dropout(one_rank, seed=0, step=0)
    assert not torch.equal(losses_of(model.train(), tokens), expected)
    whole, embedded, after_attention, after_mlp = states
    is_kept = embedded != 0
    torch.testing.assert_close(embedded, whole / (1 - rate) * is_kept)
    dropped = [~is_kept, after_attention == embedded, after_mlp == after_attention]
    error = 5 * math.sqrt(rate * (1 - rate) / whole.numel())  # five standard errors
    for mask in dropped:
        assert abs(mask.float().mean().item() - rate) < error


SHAPE = ModelConfig(4, 4, 96, 192, VOCAB_SIZE, max_sequence_length=64)


@pytest.fixture(scope="module")
def model(one_rank):
    return build_model(SHAPE, one_rank, seed=1)


def test_initial_weights_depend_on_the_seed_alone(one_rank, model):
    torch.manual_seed(999)
    again = build_model(SHAPE, one_rank, seed=1)
    before = torch.get_rng_state()
    initialize_weights(again, SHAPE, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    weights, same = dict(model.named_parameters()), dict(again.named_parameters())
    assert all(torch.equal(weight, same[name]) for name, weight in weights.items())
    initialize_weights(again, SHAPE, seed=2)
    matrices = {name: weight for name, weight in weights.items() if weight.dim() == 2}
    for name, matrix in matrices.items():  # padding rows are zero in both
        assert (matrix == same[name]).float().mean() < 0.05, name
    starts = {tuple(matrix[0, :8].tolist()) for matrix in matrices.values()}
    assert len(starts) == 4 * SHAPE.num_layers + 2


def test_initial_weights_follow_gpt2s_distributions(model):
    assert not model.embedding.word_embeddings.weight[VOCAB_SIZE:].any()  # padding
    scaled = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            expected = 1.0 if "layernorm" in name and name.endswith("weight") else 0.0
            assert (parameter == expected).all(), name
            continue
        std, matrix = INIT_STD, parameter.detach()
        if name.endswith(("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")):
            std /= math.sqrt(2 * SHAPE.num_layers)
            scaled += 1
        sampled = matrix[: SHAPE.vocab_size] if "word_embeddings" in name else matrix
        error = 5 / math.sqrt(sampled.numel())  # five standard errors
        assert abs(sampled.mean().item()) < std * error, name
        assert abs(sampled.std().item() / std - 1) < error, name
        within = (sampled.abs() < std).double().mean().item()
        assert abs(within - math.erf(1 / math.sqrt(2))) < error, name
    assert scaled == 2 * SHAPE.num_layers


# Compiled layers: without a GPU, the graphs run eagerly.


@pytest.fixture
def _compiler():
    """Enable the compiler during a test; otherwise the CPU stand-in disables it."""
    torch._dynamo.reset()
    torch.compiler.set_stance("default")
    yield
    torch.compiler.set_stance("force_eager")
    torch._dynamo.reset()


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_share_one_graph_and_do_not_change_results(one_rank, tokens, family):
    config = FAMILIES[family]
    plain, compiled = (build_model(config, one_rank, seed=1) for _ in range(2))
    graphs = CompileCounterWithBackend("aot_eager")
    compile_layers(compiled, backend=graphs)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    found = []
    for model in (plain, compiled):
        assert graphs.frame_count == 0
        losses = losses_of(model, tokens)
        losses.mean().backward()
        found.append([losses.detach(), *(p.grad for p in model.parameters())])
    for expected, result in zip(*found, strict=True):
        if config.is_rotary:  # the compiler rounds the rotation's fused multiply-add differently
            torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)
        else:
            assert torch.equal(result, expected)
    assert graphs.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert not torch._dynamo.utils.counters["recompiles"]


def test_layers_that_cannot_be_compiled_are_an_error(monkeypatch):
    with pytest.raises(UserError, match="CUDA"):
        check_compile()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compiled_layers, "triton_problem", lambda: "Triton needs gcc")
    with pytest.raises(UserError, match="Triton needs gcc"):
        check_compile()


def test_the_sizes_have_the_papers_numbers_of_parameters():
    millions = {"60m": 60, "82m": 82, "124m": 124, "210m": 210, "684m": 684, "1.2b": 1200}
    for name, expected in millions.items():
        count = preset(name, 50_257, 1024).num_parameters
        assert count / 1e6 == pytest.approx(expected, rel=0.015), name
    assert preset("124m", 50_257, 1024).num_parameters == 124_439_808  # GPT-2's


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "mlp"),
    [("regmix-1m", 2, 256, 512), ("regmix-60m", 10, 768, 1536), ("regmix-1b", 22, 2048, 5632)],
)
def test_regmixs_sizes_are_those_of_its_code(name, layers, hidden, mlp):
    """Matrices of attention and SwiGLU, weights of RMSNorm, two embeddings, and no biases."""
    config, vocab = preset(name, 50_432, 2048), 50_432
    layer = 4 * hidden**2 + 3 * hidden * mlp + 2 * hidden
    assert config.num_parameters == 2 * vocab * hidden + layers * layer + hidden
    assert config.is_rotary
    assert config.kv_channels == {"regmix-1m": 32, "regmix-60m": 96, "regmix-1b": 128}[name]
