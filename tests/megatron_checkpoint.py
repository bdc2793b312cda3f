"""Write a checkpoint as Megatron-LM's training loop does, with megatron-core's own model."""

from __future__ import annotations

import argparse
import dataclasses
import math
import queue
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import gelu, silu

from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.parallel.layout import Layout

ITERATION, SAMPLES = 1000, 64_000


def arguments(config: ModelConfig, tokenizer: Path | None, **changes: Any) -> argparse.Namespace:
    """Return Megatron-LM's arguments of ``config``.

    Later releases have an argument for each field of megatron-core's config. Many values are
    objects of other classes.
    """
    fields = {f.name: f.default for f in dataclasses.fields(TransformerConfig)}
    # Releases have arguments of one or of the other name.
    for name in ("layernorm_epsilon", "layernorm_zero_centered_gamma"):
        del fields[name]
    is_swiglu, scaling = config.activation == "swiglu", config.rope_scaling
    values = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "group_query_attention": config.num_query_groups < config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "kv_channels": config.kv_channels,
        "max_position_embeddings": config.max_sequence_length,
        "position_embedding_type": config.position_embedding_type,
        "add_position_embedding": not config.is_rotary,
        "use_rotary_position_embeddings": False,
        "rotary_base": int(config.rotary_base),
        "rotary_percent": config.rotary_percent,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "normalization": config.normalization,
        "norm_epsilon": config.layernorm_epsilon,
        "apply_layernorm_1p": False,
        "swiglu": is_swiglu,
        "squared_relu": False,
        "bias_gelu_fusion": config.activation == "gelu_tanh",
        "bias_swiglu_fusion": True,
        "openai_gelu": False,
        "add_bias_linear": config.add_bias_linear,
        "add_qkv_bias": config.add_qkv_bias and not config.add_bias_linear,
        "qk_layernorm": config.qk_layernorm,
        "untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights,
        "num_experts": None,
        "multi_latent_attention": False,
        "make_vocab_size_divisible_by": 128,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": None if tokenizer is None else str(tokenizer),
        "vocab_size": None,
        "padded_vocab_size": 128 * math.ceil(config.vocab_size / 128),
        "iteration": 3,  # the iteration at which the last run started
        "consumed_train_samples": SAMPLES,
        "hidden_dropout": 0.1,
        "world_size": 1,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 1,
        "sequence_parallel": False,
        "params_dtype": torch.bfloat16,
        "attention_backend": AttnBackend.auto,
        "activation_func": gelu,
        "data_cache_path": Path("cache"),
    }
    if scaling is not None and scaling.type == "llama3":
        values |= {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
    elif scaling is not None:
        values["rotary_seq_len_interpolation_factor"] = int(scaling.factor)
    return argparse.Namespace(**{**fields, **values, **changes})


def megatron_model(args: argparse.Namespace, layout: Layout) -> GPTModel:
    """Build this rank's part of the model of ``args`` as Megatron-LM does, in float32.

    Norms and biases are random, so that each of them matters.
    """
    groups = args.num_query_groups if args.group_query_attention else None
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=groups,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        gated_linear_unit=args.swiglu,
        activation_func=silu if args.swiglu else gelu,
        bias_activation_fusion=args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
        tensor_model_parallel_size=layout.tensor_size,
    )
    spec = get_gpt_layer_local_spec(
        qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    )
    generator = torch.Generator().manual_seed(layout.tensor_rank)
    replicated = torch.Generator().manual_seed(100)
    with torch.no_grad():
        for parameter in model.parameters():
            is_sharded = getattr(parameter, "tensor_model_parallel", False)
            source = generator if is_sharded else replicated
            sampled = 0.2 * torch.randn(parameter.shape, generator=source)
            parameter.copy_(parameter + sampled if parameter.dim() == 1 else sampled)
    return model.eval()


def save_megatron(
    folder: Path,
    model: GPTModel,
    args: argparse.Namespace | None,
    *,
    iteration: int = ITERATION,
    metadata: dict[str, bool] | None = None,
    common_among_tensors: bool | None = None,
    **common: Any,
) -> Path:
    """Save ``model`` in ``folder``, a folder for --save, and return the iteration's folder.

    Args:
        folder: the folder.
        model: this rank's part of the model.
        args: arguments to save; None for a checkpoint without them.
        iteration: optimizer steps done.
        metadata: options of the layout of tensors.
        common_among_tensors: whether to keep the common state among the tensors, as megatron-core
            does from 0.19 on, or in common.pt; by default, as the installed release does.
        common: further state.
    """
    target = folder / f"iter_{iteration:07d}"
    rank = torch.distributed.get_rank()
    if rank == 0:
        target.mkdir(parents=True)
    torch.distributed.barrier()
    common = {
        **({} if args is None else {"args": args}),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 1e18,
        **common,
    }
    state = {
        **common,
        "model": model.sharded_state_dict(metadata=metadata),
        # States that Megatron-LM saves as tensors and as pickled objects.
        "optimizer": ShardedTensor.from_rank_offsets(
            "optimizer.state.exp_avg.decoder.layers.0.weight", torch.ones(3), replica_id=rank
        ),
        "rng_state": ShardedObject("rng_state", [object], (1, 1), (0, 0), replica_id=rank),
    }
    if common_among_tensors:
        state["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=rank)
    # megatron would start a server process for this queue, which would outlive the ranks of tests.
    with mock.patch.object(filesystem_async, "_results_queue", queue.SimpleQueue()):
        dist_checkpointing.save(state, str(target), ("torch_dist", 1))
    if rank == 0 and common_among_tensors is not None:
        (target / "common.pt").unlink(missing_ok=True)
        if not common_among_tensors:
            torch.save(common, target / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return target


@torch.no_grad()
def logits_of(model: GPTModel, length: int, vocab_size: int) -> torch.Tensor:
    """Return the logits [b, s, v] of random tokens at all positions, from all ranks' shards."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocab_size, (3, length), generator=generator)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    shard = model(tokens, torch.arange(length).expand_as(tokens), mask)
    return gather_from_tensor_model_parallel_region(shard)[..., :vocab_size]
