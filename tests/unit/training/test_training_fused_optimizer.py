"""torch's fused kernels in megatron's optimizer: the same numbers, and one wait for the device."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from megatron_chameleon.model.gpt import build_model_chunks
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.training import optimizer as optimizer_module
from megatron_chameleon.training.optimizer import build_optimizer, build_scheduler, data_parallel
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.step import BatchShape, Passes, train_step
from tests.device_reads import device_reads

SHAPE = ModelShape(ModelSize(2, 2, 32, 64), vocab_size=100, max_sequence_length=16)
OPTIONS = OptimizerOptions(lr=1e-2, min_lr=1e-3, lr_warmup_iters=0, clip_grad=0.1)


def micro_batches(count, *, masked=False):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        text = torch.randint(100, (2, 17), generator=generator)
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": (text[:, 1:] >= 20 * masked).float(),
            "position_ids": torch.arange(16).repeat(2, 1),
            "domain": torch.zeros(2, dtype=torch.int64),
        }


def stepper(layout, *, bf16=False, masked=False):
    """With ``masked`` losses, how many tokens have one is known on the device alone."""
    model = build_model_chunks(SHAPE, layout, 0, bf16=bf16, per_token_loss=masked)
    chunks = data_parallel(model, layout, bf16=bf16)
    optimizer = build_optimizer(chunks, OPTIONS, layout, bf16=bf16)
    scheduler = build_scheduler(optimizer, OPTIONS, 100)
    passes = Passes(chunks, BatchShape(2, 2, 16), num_domains=1)
    batches = micro_batches(100, masked=masked)

    def step():
        return train_step(
            chunks, optimizer, scheduler, lambda: passes.forward_backward(batches)
        ).grad_norm

    return step, optimizer, chunks


def test_a_step_waits_for_the_device_once(one_rank, monkeypatch):
    """For the gradient's norm, whatever the number of parameters and micro-batches."""
    for bf16, masked in itertools.product((False, True), repeat=2):
        step, _, _ = stepper(one_rank, bf16=bf16, masked=masked)
        step()
        assert device_reads(step, monkeypatch) == 1, (bf16, masked)


def test_megatrons_own_functions_wait_for_every_parameter(one_rank, monkeypatch):
    """Or the test above could not fail."""
    step, _, chunks = stepper(one_rank)
    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    assert device_reads(step, monkeypatch) > len(list(chunks[0].parameters()))


def test_every_group_is_fused_and_stays_so_after_a_load(one_rank):
    step, optimizer, _ = stepper(one_rank)
    step()
    (part,) = optimizer.chained_optimizers
    assert all(group["fused"] for group in part.optimizer.param_groups)
    saved = part.optimizer.state_dict()
    for group in saved["param_groups"]:
        group["fused"] = None  # as a checkpoint may say that was made without it
    part.optimizer.load_state_dict(saved)
    assert all(group["fused"] for group in part.optimizer.param_groups)
    step()
    steps = {float(state["step"]) for state in part.optimizer.state.values()}
    assert steps == {2.0}


def test_the_fused_update_is_that_of_plain_adamw(one_rank):
    weights = []
    for fused in (True, False):
        step, optimizer, chunks = stepper(one_rank)
        for group in optimizer.chained_optimizers[0].optimizer.param_groups:
            assert group["fused"]
            group["fused"] = fused
        for _ in range(5):
            step()
        weights.append([p.detach() for p in chunks[0].parameters()])
    for mine, right in zip(*weights, strict=True):
        # Far below the 0.05 that weights move, also where gradients are rounding alone.
        torch.testing.assert_close(mine, right, atol=5e-5, rtol=0)


@pytest.mark.parametrize("sharded", [False, True])
def test_bf16_weights_are_written_back_as_megatron_does_at_once(one_rank, sharded, monkeypatch):
    layout = dataclasses.replace(one_rank, use_distributed_optimizer=sharded)
    step, optimizer, chunks = stepper(layout, bf16=True)
    copies: list[int] = []
    foreach_copy = torch._foreach_copy_

    def counted(targets, sources):
        copies.append(len(targets))
        foreach_copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    step()
    weights = list(chunks[0].parameters())
    assert copies == [len(weights)]
    mine = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.data.zero_()
    (part,) = optimizer.chained_optimizers
    type(part)._copy_main_params_to_model_params(part)
    for found, weight in zip(mine, weights, strict=True):
        assert torch.equal(found, weight)
        assert weight.any()


def test_gradients_accumulate_within_apexs_matrix_product(one_rank, monkeypatch):
    """Into the buffers that data parallelism reduces, the tied embedding's included."""
    products: list[torch.Size] = []

    def wgrad_gemm_accum_fp32(inputs, gradient, main_grad):
        products.append(main_grad.shape)
        main_grad += gradient.T @ inputs

    apex = SimpleNamespace(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", apex, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    found = []
    for fused in (False, True):
        model = build_model_chunks(SHAPE, one_rank, 0, gradient_accumulation_fusion=fused)
        chunks = data_parallel(model, one_rank, bf16=False)
        build_optimizer(chunks, OPTIONS, one_rank, bf16=False)
        Passes(chunks, BatchShape(2, 2, 16), num_domains=1).forward_backward(micro_batches(2))
        found.append({name: p.main_grad for name, p in chunks[0].named_parameters()})
    # Of two micro-batches: four matrices of each layer, and the output layer.
    assert len(products) == 2 * (4 * 2 + 1)
    for name, gradient in found[0].items():
        assert gradient.any()
        torch.testing.assert_close(found[1][name], gradient, msg=name)


def tensors(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator) for size in sizes]


def test_the_norm_is_megatrons():
    given = tensors((3, 4), (5,), (1,), (64, 64))
    mine, _ = optimizer_module.l2_norm(1, torch.zeros(1), [given], False)
    right, _ = local_multi_tensor_l2_norm(1, torch.zeros(1), [given], False)
    assert mine.shape == right.shape
    torch.testing.assert_close(mine, right)


def test_scaling_is_megatrons_in_place_and_to_other_tensors():
    for in_place in (True, False):
        mine, right = tensors((3, 4), (5,)), tensors((3, 4), (5,))
        targets = [mine if in_place else [torch.empty_like(t) for t in mine], right]
        for function, sources, to in zip(
            (optimizer_module.scale, local_multi_tensor_scale), (mine, right), targets, strict=True
        ):
            function(1, torch.zeros(1), [sources, to], 0.3)
        for a, b in zip(*targets, strict=True):
            assert torch.equal(a, b)
        if not in_place:
            assert torch.equal(mine[0], tensors((3, 4))[0])  # what was read is as it was
