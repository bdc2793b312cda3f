"""Flex attention within documents: blocks, results, recomputation and compiled layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask

from megatron_chameleon.blend.boundaries import document_mask, document_starts
from megatron_chameleon.errors import UserError
from megatron_chameleon.model import document_attention
from megatron_chameleon.model.compiled_layers import compile_layers
from megatron_chameleon.model.document_attention import (
    BLOCK_SIZE,
    block_mask,
    check_document_attention,
    document_blocks,
)
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.parallel.options import RecomputeOptions
from tests.block_masks import attention_of_blocks, visible_pairs
from tests.families import FAMILIES


def random_starts(length: int, share: float, seed: int = 0) -> torch.Tensor:
    """Document starts [3, length], with an end of document at a ``share`` of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    return document_starts(torch.rand(3, length, generator=generator) < share)


@pytest.mark.parametrize("length", [32, 128, 300, 1024])
@pytest.mark.parametrize("share", [0.0, 0.003, 0.02, 1.0])
def test_blocks_are_those_of_torch(length, share):
    starts = random_starts(length, share)
    made = block_mask(document_blocks(starts), 3, length)
    right = create_block_mask(made.mask_mod, 3, None, length, length, "cpu", BLOCK_SIZE)
    for name in ("kv", "full_kv", "q", "full_q"):
        for part in (f"{name}_num_blocks", f"{name}_indices"):
            assert torch.equal(getattr(made, part), getattr(right, part)), part
    assert torch.equal(visible_pairs(made), ~document_mask(starts))


@pytest.fixture
def _compiler(monkeypatch):
    """Enable the compiler, and flex attention's backward pass on a CPU, which then runs eagerly."""
    torch._dynamo.reset()
    torch.compiler.set_stance("default")
    monkeypatch.setattr(flex, "_validate_device", lambda *_heads: None)
    yield
    torch.compiler.set_stance("force_eager")
    torch._dynamo.reset()


def losses_and_gradients(model, starts, mask):
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(250, (2, *starts.shape), generator=generator)
    positions = torch.arange(starts.size(1)).expand_as(tokens)
    model.zero_grad()
    losses = model(tokens, positions, mask, labels=labels)
    losses.mean().backward()
    return [losses.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(
    ("family", "whole_layers"),
    [("gpt2", True), ("llama", False), ("qwen2", False), ("qwen3", True)],
)
def test_losses_and_gradients_are_those_of_the_dense_mask(one_rank, family, whole_layers):
    model = build_model(FAMILIES[family], one_rank, seed=1)
    batches = [random_starts(FAMILIES[family].max_sequence_length, 0.1, seed) for seed in range(2)]
    with torch.compiler.set_stance("force_eager"):
        right = [losses_and_gradients(model, starts, document_mask(starts)) for starts in batches]
    graphs = CompileCounterWithBackend("aot_eager")
    if whole_layers:
        compile_layers(model)
    with torch.compiler.set_stance("default", force_backend=graphs):
        for starts, expected in zip(batches, right, strict=True):
            assert_near(losses_and_gradients(model, starts, starts), expected)
    assert graphs.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.usefixtures("_compiler")
def test_more_shapes_than_the_compiler_keeps_do_not_run_eagerly():
    """Eager flex attention computes all scores, and may be wrong."""
    packed, query = document_blocks(torch.zeros(1, 32, dtype=torch.int64)), torch.ones(1, 2, 32, 16)
    with (
        torch._dynamo.config.patch(recompile_limit=0),
        pytest.raises(FailOnRecompileLimitHit),
    ):
        document_attention.document_attention(query, query, query, packed, 1.0)


@pytest.mark.parametrize("granularity", [None, "selective", "full"])
def test_recomputed_layers_have_the_blocks_of_their_batch(one_rank, monkeypatch, granularity):
    monkeypatch.setattr(document_attention, "compiled_flex_attention", attention_of_blocks)
    # Three blocks, some of which are fully visible.
    config = dataclasses.replace(FAMILIES["llama"], max_sequence_length=300)
    recompute = RecomputeOptions(recompute_granularity=granularity)
    model = build_model(config, one_rank, seed=1, recompute=recompute)
    first, second = (random_starts(300, 0.01, seed) for seed in range(2))
    expected = losses_and_gradients(model, first, document_mask(first))
    assert_near(losses_and_gradients(model, first, first), expected)
    assert (losses_and_gradients(model, second, second)[0] - expected[0]).abs().max() > 1e-3


def test_the_kernel_needs_triton(monkeypatch):
    check_document_attention()  # a CPU uses the dense mask
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(document_attention, "triton_problem", lambda: "Triton needs gcc")
    with pytest.raises(UserError, match=r"--document-attention.*Triton needs gcc"):
        check_document_attention()
