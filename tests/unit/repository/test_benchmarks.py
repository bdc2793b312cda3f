"""Test that benchmarks compare equal models on equal numbers of tokens."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
import torch

from benchmarks import train
from benchmarks.plain_models import PlainModel
from benchmarks.train import Case, Contestant, Ours, Plain
from megatron_chameleon.model.gpt import build_model
from tests.families import LENGTH, VARIANTS

CASE = Case("nano", 32, False, tokens_per_step=128)
ARGUMENTS = argparse.Namespace(peak=None, repeats=2)


PLAIN_NAMES = {
    "embedding.word_embeddings": "tokens",
    "embedding.position_embeddings": "positions",
    "decoder.layers": "blocks",
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "query_key_value",
    "self_attention.linear_proj": "projection",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc2": "down",
    "decoder.final_layernorm": "norm",
    "output_layer": "head",
}


@torch.no_grad()
def copy_weights(ours, plain, config):
    """Copy our weights into the plain model, whose queries precede all keys and values."""
    for name, weight in ours.named_parameters():
        if "linear_qkv" in name:
            grouped = weight.unflatten(0, (config.num_query_groups, -1, config.kv_channels))
            queries = config.num_attention_heads // config.num_query_groups
            parts = grouped.split((queries, 1, 1), dim=1)
            weight = torch.cat([part.flatten(0, 2) for part in parts])
        fc1 = "gate_up" if config.activation == "swiglu" else "up"
        for old, new in {**PLAIN_NAMES, "mlp.linear_fc1": fc1}.items():
            name = name.replace(old, new)
        plain.get_parameter(name).copy_(weight)


@pytest.mark.parametrize("family", ["gpt2", "llama", "llama, tied", "llama, no groups"])
def test_the_plain_model_computes_our_losses(one_rank, family):
    config = dataclasses.replace(VARIANTS[family], vocab_size=256)  # neither model pads it
    ours, plain = build_model(config, one_rank, seed=0), PlainModel(config)
    for parameter in ours.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # biases and norms, too
    copy_weights(ours, plain, config)
    text = torch.randint(256, (3, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(LENGTH).expand(3, -1)
    losses = ours(tokens, positions, None, labels=labels)
    torch.testing.assert_close(plain(tokens, labels), losses.mean(), atol=1e-6, rtol=1e-6)


def test_contestants_train_on_the_same_number_of_tokens(one_rank):
    contestants: dict[str, Contestant] = {
        "ours": Ours(CASE, one_rank),
        "ours, documents": Ours(CASE, one_rank, documents="flex"),
        "plain": Plain(CASE, one_rank),
    }
    found = train.time_interleaved(contestants, CASE, ARGUMENTS)
    assert found.keys() == contestants.keys()
    for entry in found.values():
        assert (entry["tokens_per_step"], len(entry["seconds"])) == (128, 2)
