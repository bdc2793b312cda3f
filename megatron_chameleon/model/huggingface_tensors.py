"""Convert tensors to and from Hugging Face's GPT-2, Llama, Qwen2 and Qwen3.

The models are the same; their tensors differ in four respects. Hugging Face's GPT-2 stores the
matrices of a layer as [in, out] (Conv1D), all others as [out, in]. Hugging Face stores queries,
keys and values as three matrices (GPT-2: as three blocks of one matrix), and Megatron in one
matrix, group by group, [queries of group 1 | key 1 | value 1 | queries of group 2 | ...], so that
tensor-parallel ranks have whole groups. Hugging Face stores the gate and the input of SwiGLU as two
matrices, and Megatron as two blocks of one matrix. Hugging Face's embedding has one row per token,
and Megatron's has additional rows of padding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from torch.nn.functional import pad

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.initialization import (
    OUTPUT_LAYER,
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
    global_name,
    own_shard,
)

Tensors = dict[str, torch.Tensor]
Part = tuple[str, tuple[int, ...]]
"""Name and shape of a Hugging Face tensor."""

UNQUANTIZED = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types that are not quantized, by their names in safetensors files."""
CONSTANT = re.compile(r"(.*\.)?(attn\.bias|masked_bias|position_ids|inv_freq)")
"""Names of masks, positions and rotary frequencies, which only older folders store."""
_HEAD = "lm_head.weight"


def _prefix(config: ModelConfig) -> str:
    return "model." if config.is_rotary else "transformer."


def huggingface_tensors(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """Map each parameter name of the whole model to the Hugging Face tensors that it joins."""
    h, f = config.hidden_size, config.ffn_hidden_size
    if config.is_rotary:
        q, kv = config.query_size, config.key_size
        names = "embed_tokens", "layers", "norm"
        norms = {
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
        }
        linears: dict[str, list[Part]] = {
            "self_attention.linear_qkv": [
                ("self_attn.q_proj", (q, h)),
                ("self_attn.k_proj", (kv, h)),
                ("self_attn.v_proj", (kv, h)),
            ],
            "self_attention.linear_proj": [("self_attn.o_proj", (h, q))],
            "mlp.linear_fc1": [("mlp.gate_proj", (f, h)), ("mlp.up_proj", (f, h))],
            "mlp.linear_fc2": [("mlp.down_proj", (h, f))],
        }
    else:
        names = "wte", "h", "ln_f"
        norms = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"}
        linears = {
            "self_attention.linear_qkv": [("attn.c_attn", (h, 3 * h))],
            "self_attention.linear_proj": [("attn.c_proj", (h, h))],
            "mlp.linear_fc1": [("mlp.c_fc", (h, f))],
            "mlp.linear_fc2": [("mlp.c_proj", (f, h))],
        }
    embedding, layers, final_norm = names
    prefix = _prefix(config)
    tensors: dict[str, tuple[Part, ...]] = {
        WORD_EMBEDDINGS: ((f"{prefix}{embedding}.weight", (config.vocab_size, h)),)
    }
    if not config.is_rotary:
        positions = config.max_sequence_length, h
        tensors[POSITION_EMBEDDINGS] = ((f"{prefix}wpe.weight", positions),)

    def add_norm(ours: str, theirs: str, size: int) -> None:
        for kind in ("weight", "bias")[: config.norm_parameters]:
            tensors[f"{ours}.{kind}"] = ((f"{prefix}{theirs}.{kind}", (size,)),)

    for number in range(config.num_layers):
        ours, theirs = f"decoder.layers.{number}", f"{layers}.{number}"
        for name, other in norms.items():
            add_norm(f"{ours}.{name}", f"{theirs}.{other}", h)
        if config.qk_layernorm:
            for kind in "qk":
                name, other = f"self_attention.{kind}_layernorm", f"self_attn.{kind}_norm"
                add_norm(f"{ours}.{name}", f"{theirs}.{other}", config.kv_channels)
        for name, parts in linears.items():
            tensors[f"{ours}.{name}.weight"] = tuple(
                (f"{prefix}{theirs}.{part}.weight", size) for part, size in parts
            )
            has_bias = config.add_qkv_bias if "qkv" in name else config.add_bias_linear
            if has_bias:
                outputs = 0 if config.is_rotary else 1
                tensors[f"{ours}.{name}.bias"] = tuple(
                    (f"{prefix}{theirs}.{part}.bias", (size[outputs],)) for part, size in parts
                )
    add_norm("decoder.final_layernorm", final_norm, h)
    if config.untie_embeddings_and_output_weights:
        tensors[OUTPUT_LAYER] = ((_HEAD, (config.vocab_size, h)),)
    return tensors


def to_huggingface(parameters: Mapping[str, torch.Tensor], config: ModelConfig) -> Tensors:
    """Convert to the contiguous tensors of a causal language model, without a tied output layer.

    Args:
        parameters: unsharded parameters of the whole model, by global name.
        config: the model.
    """
    tensors = {}
    for name, parts in huggingface_tensors(config).items():
        split = _split(name, parameters[name].detach(), config)
        for (theirs, _), tensor in zip(parts, split, strict=True):
            # Each tensor owns its storage: a view would be saved with its whole storage.
            tensors[theirs] = tensor.clone(memory_format=torch.contiguous_format)
    return tensors


@torch.no_grad()
def load_huggingface(
    model: GPTModel, tensors: Mapping[str, torch.Tensor], config: ModelConfig
) -> None:
    """Load tensors into this rank's part of a model, in any layout.

    Every parameter is overwritten; rows that pad the embedding become zero.

    Args:
        model: one chunk of the model.
        tensors: from :func:`checked_tensors`; embedding rows beyond the vocabulary of ``config``
            are not loaded.
        config: the whole model.
    """
    theirs = huggingface_tensors(config)
    for local_name, parameter in model.named_parameters():
        name = global_name(model, local_name)
        tensor = _join(name, [tensors[part] for part, _ in theirs[name]], config)
        if name in (WORD_EMBEDDINGS, OUTPUT_LAYER):
            padding = (0, 0, 0, model.vocab_size - config.vocab_size)
            tensor = pad(tensor[: config.vocab_size], padding)
        parameter.copy_(own_shard(model, parameter, tensor))


def _join(name: str, parts: Sequence[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """Join Hugging Face's tensors to the parameter called ``name``."""
    if not config.is_rotary and "decoder" in name:
        parts = [part.T if part.dim() == 2 else part for part in parts]
        if "linear_qkv" in name:
            parts = parts[0].chunk(3)
    if "linear_qkv" in name:
        groups = [part.unflatten(0, (config.num_query_groups, -1)) for part in parts]
        return torch.cat(groups, dim=1).flatten(0, 1)
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _split(name: str, tensor: torch.Tensor, config: ModelConfig) -> list[torch.Tensor]:
    """Split the unsharded parameter called ``name`` into Hugging Face's tensors."""
    if name in (WORD_EMBEDDINGS, OUTPUT_LAYER):
        return [tensor[: config.vocab_size]]
    parts = [tensor]
    if "linear_qkv" in name:
        grouped = tensor.unflatten(0, (config.num_query_groups, -1))
        per_group = config.query_size // config.num_query_groups
        widths = [per_group, config.kv_channels, config.kv_channels]
        parts = [part.flatten(0, 1) for part in grouped.split(widths, dim=1)]
    elif "linear_fc1" in name and config.activation == "swiglu":
        parts = list(tensor.chunk(2))
    if not config.is_rotary and "decoder" in name:
        whole = torch.cat(parts)
        parts = [whole.T if whole.dim() == 2 else whole]
    return parts


def checked_tensors(
    tensors: Mapping[str, torch.Tensor], config: ModelConfig, where: str
) -> Tensors:
    """Check that ``tensors`` are those of ``config``; return them under the causal model's names.

    Folders of a model without its head omit the prefix of the names; older folders contain
    constants, and some contain the tied output layer.

    Raises:
        UserError: if a tensor is missing, unknown, duplicate, of another shape, not floating point
            or not finite, or if a tied output layer differs from the embedding.
    """
    prefix = _prefix(config)
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if len(found) < len(tensors):
        twice = min(name for name in found if name in tensors and prefix + name in tensors)
        raise UserError(
            f"{where} holds both {twice} and {prefix}{twice}, two versions of one tensor; "
            "download the folder again"
        )
    found = {name: tensor for name, tensor in found.items() if not CONSTANT.fullmatch(name)}
    expected = huggingface_tensors(config)
    tied_head = None if OUTPUT_LAYER in expected else found.pop(_HEAD, None)
    checked = {}
    for name, shape in (part for parts in expected.values() for part in parts):
        plain = name.removeprefix(prefix)
        if plain not in found:
            raise UserError(f"{where} holds no tensor {name}, which its config.json requires")
        tensor = checked[name] = found.pop(plain)
        problem = None
        if tuple(tensor.shape) != shape:
            problem = f"has shape {list(tensor.shape)}, its config.json requires {list(shape)}"
        elif tensor.dtype not in UNQUANTIZED.values():
            problem = f"is {tensor.dtype}: quantized weights are not supported"
        elif not torch.isfinite(tensor).all():
            problem = "has NaN or infinite values; use another copy or model"
        if problem:
            raise UserError(f"{where}: tensor {name} {problem}")
    if found:
        raise UserError(
            f"{where} has {len(found)} unexpected tensor(s), such as {min(found)}: the weights do "
            "not match config.json"
        )
    (embedding, _), *_ = expected[WORD_EMBEDDINGS]
    if tied_head is not None and not torch.equal(tied_head, checked[embedding]):
        raise UserError(
            f"{where}: {_HEAD} differs from the embedding, but its config.json ties them"
        )
    return checked
