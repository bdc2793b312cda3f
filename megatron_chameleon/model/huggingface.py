"""Convert settings and tensors to and from Hugging Face's GPT-2.

Both implement the same model (Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners"). Their tensors differ in three respects. Hugging Face stores matrices of a layer as [in,
out] (Conv1D), and Megatron as [out, in]. Hugging Face stores queries, keys and values in three
blocks, [q | k | v] over all heads, and Megatron head by head, [q1 k1 v1 q2 k2 v2 ...], so that
tensor-parallel ranks have whole heads. Hugging Face's embedding has one row per token, and
Megatron's has additional rows of padding.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from pydantic import Field, NonNegativeFloat, PositiveInt, TypeAdapter, ValidationError
from torch.nn.functional import pad

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.initialization import (
    INIT_STD,
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
    global_name,
    own_shard,
)
from megatron_chameleon.model.sizes import Activation, ModelShape, ModelSize

Tensors = dict[str, torch.Tensor]

_PREFIX = "transformer."
_EMBEDDING, _TIED_HEAD = _PREFIX + "wte.weight", "lm_head.weight"
# Older folders store the causal mask as tensors.
_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Fields of ``config.json`` that determine what the model computes.

    Defaults are those of transformers' GPT2Config.
    """

    model_type: Literal["gpt2"]
    vocab_size: PositiveInt = 50_257
    n_positions: PositiveInt = 1024
    n_embd: PositiveInt = 768
    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_inner: PositiveInt | None = None
    activation_function: Literal[
        "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"
    ] = "gelu_new"
    resid_pdrop: NonNegativeFloat = 0.1
    embd_pdrop: NonNegativeFloat = 0.1
    attn_pdrop: NonNegativeFloat = 0.1
    layer_norm_epsilon: Annotated[float, Field(ge=1e-5, le=1e-5)] = 1e-5  # megatron's default
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: Literal[True] = True


def read_config(body: Mapping[str, Any], where: str) -> GPT2Config:
    """Parse ``body``, the contents of the config.json at ``where``.

    Raises:
        UserError: if a field is not supported; the message names the first such field.
    """
    try:
        config = TypeAdapter(GPT2Config).validate_json(json.dumps(dict(body)), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][:1]) or "(the whole file)"
        raise _unsupported(where, field, body.get(field), first["msg"]) from error
    if config.n_embd % config.n_head:
        reason = f"must divide n_embd, {config.n_embd}"
        raise _unsupported(where, "n_head", config.n_head, reason)
    return config


def shape_of_config(config: GPT2Config) -> ModelShape:
    """Return the model's shape."""
    size = ModelSize(
        num_layers=config.n_layer,
        num_attention_heads=config.n_head,
        hidden_size=config.n_embd,
        ffn_hidden_size=config.n_inner or 4 * config.n_embd,
    )
    is_exact = config.activation_function in ("gelu", "gelu_python")
    activation: Activation = "gelu" if is_exact else "gelu_tanh"
    return ModelShape(size, config.vocab_size, config.n_positions, activation)


def config_of_shape(shape: ModelShape, dtype: torch.dtype, eod_id: int) -> dict[str, Any]:
    """Return the contents of a model's config.json, with ``eod_id`` as its bos and eos token."""
    size = shape.size
    config = GPT2Config(
        model_type="gpt2",
        vocab_size=shape.vocab_size,
        n_positions=shape.max_sequence_length,
        n_embd=size.hidden_size,
        n_layer=size.num_layers,
        n_head=size.num_attention_heads,
        n_inner=size.ffn_hidden_size,
        activation_function="gelu" if shape.activation == "gelu" else "gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return {
        "architectures": ["GPT2LMHeadModel"],
        **dataclasses.asdict(config),
        "initializer_range": INIT_STD,
        "bos_token_id": eod_id,
        "eos_token_id": eod_id,
        # Later releases of transformers write "dtype", but still read "torch_dtype".
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def huggingface_tensors(shape: ModelShape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map each parameter name of the whole model to Hugging Face's name and shape."""
    h, f = shape.size.hidden_size, shape.size.ffn_hidden_size
    layer = {
        "input_layernorm": ("ln_1", (h,)),
        "self_attention.linear_qkv": ("attn.c_attn", (h, 3 * h)),
        "self_attention.linear_proj": ("attn.c_proj", (h, h)),
        "pre_mlp_layernorm": ("ln_2", (h,)),
        "mlp.linear_fc1": ("mlp.c_fc", (h, f)),
        "mlp.linear_fc2": ("mlp.c_proj", (f, h)),
    }
    modules: dict[str, tuple[str, tuple[int, ...]]] = {
        f"decoder.layers.{number}.{ours}": (f"h.{number}.{theirs}", size)
        for number in range(shape.size.num_layers)
        for ours, (theirs, size) in layer.items()
    }
    modules["decoder.final_layernorm"] = "ln_f", (h,)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        WORD_EMBEDDINGS: (_EMBEDDING, (shape.vocab_size, h)),
        POSITION_EMBEDDINGS: (_PREFIX + "wpe.weight", (shape.max_sequence_length, h)),
    }
    for ours, (theirs, size) in modules.items():
        tensors[f"{ours}.weight"] = f"{_PREFIX}{theirs}.weight", size
        tensors[f"{ours}.bias"] = f"{_PREFIX}{theirs}.bias", size[-1:]
    return tensors


def to_huggingface(parameters: Mapping[str, torch.Tensor], shape: ModelShape) -> Tensors:
    """Convert to the contiguous tensors of a GPT2LMHeadModel, without the tied output layer.

    Args:
        parameters: unsharded parameters of the whole model, by global name.
        shape: shape of the model.
    """
    heads = shape.size.num_attention_heads
    tensors = {}
    for ours, (theirs, _) in huggingface_tensors(shape).items():
        tensor = parameters[ours].detach()
        if ours == WORD_EMBEDDINGS:
            # Without a copy, the padding in the same storage would be saved, too.
            tensor = tensor[: shape.vocab_size].clone()
        if "linear_qkv" in ours:
            tensor = _swap_outer(tensor, heads, 3)
        if tensor.dim() == 2 and "decoder" in ours:
            tensor = tensor.T
        tensors[theirs] = tensor.contiguous()
    return tensors


@torch.no_grad()
def load_huggingface(
    model: GPTModel, tensors: Mapping[str, torch.Tensor], shape: ModelShape
) -> None:
    """Load tensors into this rank's part of a model, in any layout.

    Every parameter is overwritten; rows that pad the embedding become zero.

    Args:
        model: one chunk of the model.
        tensors: from :func:`checked_tensors`; embedding rows beyond the vocabulary of ``shape``
            are not loaded.
        shape: shape of the whole model.
    """
    theirs = huggingface_tensors(shape)
    for local_name, parameter in model.named_parameters():
        name = global_name(model, local_name)
        tensor = tensors[theirs[name][0]]
        if tensor.dim() == 2 and "decoder" in name:
            tensor = tensor.T
        if "linear_qkv" in name:
            tensor = _swap_outer(tensor, 3, shape.size.num_attention_heads)
        if name == WORD_EMBEDDINGS:
            padding = (0, 0, 0, model.vocab_size - shape.vocab_size)
            tensor = pad(tensor[: shape.vocab_size], padding)
        parameter.copy_(own_shard(model, parameter, tensor))


def checked_tensors(tensors: Mapping[str, torch.Tensor], shape: ModelShape, where: str) -> Tensors:
    """Check that ``tensors`` are those of a GPT-2; return them under GPT2LMHeadModel's names.

    Folders of a model without its head omit the prefix of the names; older folders contain causal
    masks, and some contain the tied output layer.

    Raises:
        UserError: if a tensor is missing, unknown, duplicate, of another shape, not floating point
            or not finite, or if the output layer differs from the embedding.
    """
    found = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    if len(found) < len(tensors):
        twice = min(name for name in found if name in tensors and _PREFIX + name in tensors)
        raise UserError(
            f"{where} holds both {twice} and {_PREFIX}{twice}, two versions of one tensor; "
            "download the folder again"
        )
    found = {name: tensor for name, tensor in found.items() if not _MASK.fullmatch(name)}
    head = found.pop(_TIED_HEAD, None)
    checked = {}
    for name, expected in huggingface_tensors(shape).values():
        plain = name.removeprefix(_PREFIX)
        if plain not in found:
            raise UserError(f"{where} holds no tensor {name}, which its config.json requires")
        tensor = checked[name] = found.pop(plain)
        problem = None
        if tuple(tensor.shape) != expected:
            problem = f"has shape {list(tensor.shape)}, its config.json requires {list(expected)}"
        elif not tensor.is_floating_point():
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
    if head is not None and not torch.equal(head, checked[_EMBEDDING]):
        raise UserError(
            f"{where}: {_TIED_HEAD} differs from the embedding; only tied embeddings are supported"
        )
    return checked


def _swap_outer(tensor: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Reorder rows [outer x inner x head_dim, ...] to [inner x outer x head_dim, ...]."""
    return tensor.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def _unsupported(where: str, field: str, value: object, reason: str) -> UserError:
    return UserError(
        f"{where}: field {field} {value!r}: {reason}; this model is not supported, use another"
    )
