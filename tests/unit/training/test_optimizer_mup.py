"""Maximal update parametrization: the scales of a wide model, and what they are for."""

from __future__ import annotations

import dataclasses
import math
from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version

from megatron_chameleon.checkpoint.load import load_training
from megatron_chameleon.cli import parse_options
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.scoring import Question, Scorer
from megatron_chameleon.model.config import MUP_RELEASE, ModelConfig, preset
from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.model.options import ArchitectureOptions
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.training.options import OptimizerOptions
from tests.random_training import RandomTraining, random_batches
from tests.small_corpus import word_tokenizer
from tests.unit.checkpoint.samples import saved

BASE, HEAD, LENGTH, ROWS = 64, 16, 32, 8
OPTIONS = OptimizerOptions(lr=1e-2, min_lr=1e-2, lr_warmup_iters=0, weight_decay=0.0)
HAS_MUP = Version(version("megatron-core")) >= Version(MUP_RELEASE)
has_mup = pytest.mark.skipif(not HAS_MUP, reason="needs a newer release of megatron-core")


def shape(width, *, use_mup=True, **changes):
    sizes = (2, width // HEAD, width, 4 * width)
    config = ModelConfig(*sizes, vocab_size=200, max_sequence_length=LENGTH)
    base: dict[str, Any] = {"mup_base_hidden_size": BASE, "mup_base_head_dim": HEAD}
    base = base if use_mup else {}
    return dataclasses.replace(config, use_mup=use_mup, **base, **changes)


def logits_of(model):
    batch = next(random_batches(200, ROWS, LENGTH))
    with torch.no_grad():
        return model(batch["tokens"], batch["position_ids"], None)[..., :200]


def trained(layout, config, steps):
    """Return the model after ``steps`` on the same batch, and its logits before and after."""
    training = RandomTraining(config, layout, bf16=False, optimizer=OPTIONS)
    model = unwrap(training.chunks[0])
    before = logits_of(model)
    passes = training.passes(1, ROWS)
    for _ in range(steps):
        training.step(lambda: passes.forward_backward(random_batches(200, ROWS, LENGTH)))
    return training, before, logits_of(model)


@has_mup
def test_the_default_base_is_the_papers():
    flags = ["--use-mup", "--hidden-size", "1536", "--num-attention-heads", "12"]
    config = parse_options(ArchitectureOptions, flags).apply(preset("82m", 200, LENGTH))
    assert (config.mup_base_hidden_size, config.mup_base_head_dim) == (768, 64)
    assert (config.mup_width_mult, config.kv_channels) == (2, 128)
    flags += ["--mup-base-hidden-size", "256", "--mup-base-head-dim", "32"]
    config = parse_options(ArchitectureOptions, flags).apply(preset("82m", 200, LENGTH))
    assert (config.mup_width_mult, config.mup_base_head_dim) == (6, 32)


@has_mup
def test_the_base_model_is_that_of_the_standard_parametrization(one_rank):
    _, before, after = trained(one_rank, shape(BASE), 5)
    _, plain_before, plain_after = trained(one_rank, shape(BASE, use_mup=False), 5)
    torch.testing.assert_close(before, plain_before)
    torch.testing.assert_close(after, plain_after, rtol=1e-3, atol=1e-4)


@has_mup
@pytest.mark.parametrize("untied", [False, True])
def test_a_wide_model_has_the_scales_of_the_paper(one_rank, untied):
    """Compare with the standard parametrization: Tensor Programs V, table 8."""
    multiple, head_multiple = 4, 2
    sizes: dict[str, Any] = {
        "num_attention_heads": multiple * BASE // (head_multiple * HEAD),
        "kv_channels": head_multiple * HEAD,
        "num_query_groups": 0,
        "untie_embeddings_and_output_weights": untied,
    }
    config = shape(multiple * BASE, **sizes)
    plain = shape(multiple * BASE, use_mup=False, **sizes)
    ours, theirs = build_model(config, one_rank, seed=0), build_model(plain, one_rank, seed=0)
    with torch.no_grad():
        for (name, weight), standard in zip(
            ours.named_parameters(), theirs.parameters(), strict=True
        ):
            is_scaled = name.startswith("decoder.layers.") and weight.dim() == 2
            scaled = standard / math.sqrt(multiple) if is_scaled else standard
            torch.testing.assert_close(weight, scaled, msg=name)
            standard.copy_(weight)
        # The scores are divided by the width of a head, not by its root.
        for layer in theirs.decoder.layers:
            layer.self_attention.linear_qkv.weight.view(-1, 3, head_multiple * HEAD, 4 * BASE)[
                :, 0
            ] /= math.sqrt(head_multiple)
    torch.testing.assert_close(logits_of(ours), logits_of(theirs) / multiple)

    training = RandomTraining(config, one_rank, bf16=False, optimizer=OPTIONS)
    weights = dict(unwrap(training.chunks[0]).named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    passes = training.passes(1, ROWS)
    training.step(lambda: passes.forward_backward(random_batches(200, ROWS, LENGTH)))
    assert training.model.lr == OPTIONS.lr
    for name, weight in weights.items():
        # The first step of Adam changes every weight by the learning rate.
        is_scaled = name.startswith("decoder.layers.") and weight.dim() == 2
        change = float((weight.detach() - before[name]).abs().max())
        rate = OPTIONS.lr / multiple if is_scaled else OPTIONS.lr
        assert change == pytest.approx(rate, rel=1e-2), name


@has_mup
def test_coordinates_change_alike_in_all_widths(one_rank):
    """The coordinate check of Tensor Programs V, appendix D.1."""
    widths = (64, 128, 256, 512)
    slopes = {}
    for use_mup in (False, True):
        changes = []
        for width in widths:
            _, before, after = trained(one_rank, shape(width, use_mup=use_mup), 3)
            changes.append(float((after - before).abs().mean()))
        slopes[use_mup] = math.log2(changes[-1] / changes[0]) / math.log2(widths[-1] / widths[0])
    assert abs(slopes[True]) < 0.4
    assert slopes[False] > 0.8


@has_mup
@pytest.mark.parametrize("sharded", [False, True])
def test_training_resumes_with_the_rate_of_each_group(one_rank, tmp_path, sharded):
    layout = dataclasses.replace(one_rank, use_distributed_optimizer=sharded)

    def train(training):
        passes = training.passes(1, ROWS)
        for _ in range(2):
            training.step(lambda: passes.forward_backward(random_batches(200, ROWS, LENGTH)))

    options = dataclasses.replace(OPTIONS, min_lr=1e-3, lr_warmup_iters=2, weight_decay=0.1)
    straight, resumed = (
        RandomTraining(shape(4 * BASE), layout, bf16=False, optimizer=options, train_iters=6)
        for _ in range(2)
    )
    train(straight)
    record = saved(straight.model.state(), tmp_path / "step")
    train(straight)
    load_training(record, resumed.chunks, resumed.optimizer, resumed.model.scheduler)
    train(resumed)
    expected = dict(unwrap(straight.chunks[0]).named_parameters())
    for name, weight in unwrap(resumed.chunks[0]).named_parameters():
        assert torch.equal(weight, expected[name]), name


@has_mup
def test_answers_are_scored_with_the_scale_of_the_logits(one_rank, tmp_path):
    """The scorer computes logits of the predicted tokens only, without GPTModel.forward."""
    config, tokenizer = shape(4 * BASE), load_tokenizer(word_tokenizer(tmp_path / "tokenizer.json"))
    model = build_model(config, one_rank, seed=0).eval()
    scorer = Scorer(Reader(model=unwrap(model), config=config, layout=one_rank), 1, tokenizer)
    batch = next(random_batches(200, 1, LENGTH))
    tokens = batch["tokens"][0].numpy().astype("int32")
    found = scorer.score([Question(tokens[:20], tokens[20:])]).log_likelihoods
    with torch.no_grad():
        logits = model(batch["tokens"], batch["position_ids"], None)[0, :, :200]
    expected = logits.double().log_softmax(-1)[range(19, LENGTH - 1), tokens[20:]].sum()
    assert found == pytest.approx([float(expected)], rel=1e-5)


@pytest.mark.skipif(HAS_MUP, reason="this release has muP")
def test_an_earlier_release_is_named_with_the_one_that_is_needed(one_rank):
    problem = r"--use-mup needs megatron-core 0\.19 or newer, but 0\.1[678]"
    with pytest.raises(UserError, match=problem):
        build_model(shape(BASE), one_rank, seed=0)
    with pytest.raises(UserError, match=problem):
        parse_options(ArchitectureOptions, ["--use-mup"]).apply(shape(BASE, use_mup=False))
