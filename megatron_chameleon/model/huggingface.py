"""GPT-2 as Hugging Face's transformers has it: settings, names and forms of tensors, both ways.

The same model in other words (Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners"). Tensors differ in three things. Matrices of a layer are stored [in, out] there (Conv1D)
and [out, in] here. Queries, keys and values are three blocks there, [q | k | v] over all heads, and
taken in turn head by head here, [q1 k1 v1 q2 k2 v2 ...], so that tensor-parallel ranks have whole
heads. The embedding has a row for each token there, and rows of padding here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from pydantic import NonNegativeFloat, PositiveInt, TypeAdapter, ValidationError

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.initialization import INIT_STD, global_name, own_part
from megatron_chameleon.model.sizes import Activation, ModelShape, ModelSize

LAYER_NORM_EPSILON = 1e-5

Tensors = dict[str, torch.Tensor]

_EMBEDDING = "embedding.word_embeddings.weight"
_POSITIONS = "embedding.position_embeddings.weight"
_TIED_HEAD = "lm_head.weight"
_PREFIX = "transformer."
_LAYER_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
)
# The causal mask, which older folders hold as tensors.
_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
    }
)


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """What ``config.json`` says, as far as it decides what the model computes.

    Defaults are those of transformers' GPT2Config, for what a file leaves out.
    """

    model_type: Literal["gpt2"]
    vocab_size: PositiveInt = 50_257
    n_positions: PositiveInt = 1024
    n_embd: PositiveInt = 768
    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_inner: PositiveInt | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: NonNegativeFloat = 0.1
    embd_pdrop: NonNegativeFloat = 0.1
    attn_pdrop: NonNegativeFloat = 0.1
    layer_norm_epsilon: float = LAYER_NORM_EPSILON
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: Literal[True] = True

    @property
    def largest_dropout(self) -> float:
        """The largest share that it was to be trained with; no model here has dropout."""
        return max(self.resid_pdrop, self.embd_pdrop, self.attn_pdrop)


def read_config(body: Mapping[str, Any], where: str) -> GPT2Config:
    """The settings in ``body``, the contents of a config.json; ``where`` it lies, for messages.

    Raises:
        UserError: naming the first field that no model here can have.
    """
    try:
        config = TypeAdapter(GPT2Config).validate_json(json.dumps(dict(body)), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][:1]) or "(the whole file)"
        raise _unfit(where, field, body.get(field), first["msg"]) from error
    if config.activation_function not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise _unfit(
            where, "activation_function", config.activation_function, f"not one of {known}"
        )
    if config.layer_norm_epsilon != LAYER_NORM_EPSILON:
        reason = f"layer norms have {LAYER_NORM_EPSILON:g} here"
        raise _unfit(where, "layer_norm_epsilon", config.layer_norm_epsilon, reason)
    if config.n_embd % config.n_head:
        raise _unfit(where, "n_head", config.n_head, f"it does not divide n_embd {config.n_embd}")
    return config


def shape_of_config(config: GPT2Config) -> ModelShape:
    """The shape of the model that has these settings."""
    size = ModelSize(
        num_layers=config.n_layer,
        num_attention_heads=config.n_head,
        hidden_size=config.n_embd,
        ffn_hidden_size=config.n_inner or 4 * config.n_embd,
    )
    activation = _ACTIVATIONS[config.activation_function]
    return ModelShape(size, config.vocab_size, config.n_positions, activation)


def config_of_shape(shape: ModelShape, dtype: torch.dtype, eod_id: int) -> dict[str, Any]:
    """The contents of the config.json of a model; ``eod_id`` ends documents, and begins them."""
    size = shape.size
    config = GPT2Config(
        model_type="gpt2",
        vocab_size=shape.vocab_size,
        n_positions=shape.max_sequence_length,
        n_embd=size.hidden_size,
        n_layer=size.num_layers,
        n_head=size.num_attention_heads,
        n_inner=size.ffn_hidden_size,
        activation_function={"gelu": "gelu", "gelu_tanh": "gelu_new"}[shape.activation],
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
        # Later releases say "dtype", and still read this.
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def huggingface_names(shape: ModelShape) -> dict[str, str]:
    """Parameter of the whole model here -> its name there."""
    names = {_EMBEDDING: "wte.weight", _POSITIONS: "wpe.weight"}
    for layer in range(shape.size.num_layers):
        for ours, theirs in _LAYER_PARTS.items():
            for kind in ("weight", "bias"):
                names[f"decoder.layers.{layer}.{ours}.{kind}"] = f"h.{layer}.{theirs}.{kind}"
    for kind in ("weight", "bias"):
        names[f"decoder.final_layernorm.{kind}"] = f"ln_f.{kind}"
    return {ours: _PREFIX + theirs for ours, theirs in names.items()}


def to_huggingface(parameters: Mapping[str, torch.Tensor], shape: ModelShape) -> Tensors:
    """The tensors of a GPT2LMHeadModel, contiguous, without the output layer, which is tied.

    Args:
        parameters: of the whole model, by global name.
        shape: of the model.
    """
    heads = shape.size.num_attention_heads
    tensors = {}
    for ours, theirs in huggingface_names(shape).items():
        tensor = parameters[ours].detach()
        if ours == _EMBEDDING:
            tensor = tensor[: shape.vocab_size].clone()  # a slice would be stored with its padding
        if "linear_qkv" in ours:
            tensor = _swap_outer(tensor, heads, 3)
        if _is_stored_transposed(ours, tensor):
            tensor = tensor.T
        tensors[theirs] = tensor.contiguous()
    return tensors


def from_huggingface(tensors: Mapping[str, torch.Tensor], shape: ModelShape, rows: int) -> Tensors:
    """The parameters of the whole model, by global name.

    Args:
        tensors: what :func:`checked_tensors` gives.
        shape: of the model.
        rows: of the padded embedding; those that pad it are zero.
    """
    heads = shape.size.num_attention_heads
    parameters = {}
    for ours, theirs in huggingface_names(shape).items():
        tensor = tensors[theirs]
        if _is_stored_transposed(ours, tensor):
            tensor = tensor.T
        if "linear_qkv" in ours:
            tensor = _swap_outer(tensor, 3, heads)
        if ours == _EMBEDDING:
            padding = tensor.new_zeros(rows - shape.vocab_size, shape.size.hidden_size)
            tensor = torch.cat([tensor, padding])
        parameters[ours] = tensor
    return parameters


@torch.no_grad()
def load_huggingface(
    model: GPTModel, tensors: Mapping[str, torch.Tensor], shape: ModelShape
) -> None:
    """Overwrite every parameter of this rank's part of a model, in whatever layout.

    Args:
        model: one chunk of the model.
        tensors: what :func:`checked_tensors` gives, of a vocabulary as in ``shape``.
        shape: of the whole model.
    """
    whole = from_huggingface(tensors, shape, model.vocab_size)
    for name, parameter in model.named_parameters():
        parameter.copy_(own_part(model, parameter, whole[global_name(model, name)]))


def with_vocabulary(tensors: Mapping[str, torch.Tensor], vocab_size: int) -> Tensors:
    """The same tensors with the embedding's first ``vocab_size`` rows alone."""
    embedding = _PREFIX + "wte.weight"
    assert tensors[embedding].size(0) >= vocab_size
    return {**tensors, embedding: tensors[embedding][:vocab_size]}


def checked_tensors(tensors: Mapping[str, torch.Tensor], shape: ModelShape, where: str) -> Tensors:
    """The tensors of a GPT-2, and nothing else, by their names in a GPT2LMHeadModel.

    Folders of a model without its head leave out the prefix; older ones hold causal masks, and some
    the tied output layer.

    Raises:
        UserError: if one is missing, too many, there twice, of another shape, not of floating point
            or not finite, or the output layer is not the embedding.
    """
    found = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    if len(found) < len(tensors):
        twice = min(name for name in found if name in tensors and _PREFIX + name in tensors)
        raise UserError(
            f"{where} holds both {twice} and {_PREFIX}{twice}, which are one tensor in two "
            "versions; get the folder again"
        )
    found = {name: tensor for name, tensor in found.items() if not _MASK.fullmatch(name)}
    head = found.pop(_TIED_HEAD, None)
    shapes = huggingface_shapes(shape)
    checked = {}
    for name, expected in shapes.items():
        plain = name.removeprefix(_PREFIX)
        if plain not in found:
            raise UserError(f"{where} holds no tensor {name}, which its config.json asks for")
        checked[name] = found.pop(plain)
        _check_tensor(checked[name], expected, f"{where}: tensor {name}")
    if found:
        raise UserError(
            f"{where} holds {len(found)} tensor(s) that no GPT-2 of its config.json has, "
            f"{min(found)} for one; it is of another model"
        )
    if head is not None and not torch.equal(head, checked[_PREFIX + "wte.weight"]):
        raise UserError(
            f"{where}: {_TIED_HEAD} is not the embedding; models here have both in one tensor"
        )
    return checked


def huggingface_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name there -> dimensions there."""
    h, f = shape.size.hidden_size, shape.size.ffn_hidden_size
    wide = {"attn.c_attn": (h, 3 * h), "attn.c_proj": (h, h)}
    wide |= {"mlp.c_fc": (h, f), "mlp.c_proj": (f, h)}
    whole = {"wte": (shape.vocab_size, h), "wpe": (shape.max_sequence_length, h)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in huggingface_names(shape).values():
        part, kind = name.removeprefix(_PREFIX).rsplit(".", 1)
        matrix = whole.get(part) or wide.get(re.sub(r"h\.\d+\.", "", part)) or (h,)
        shapes[name] = matrix if kind == "weight" else matrix[-1:]
    return shapes


def _check_tensor(tensor: torch.Tensor, expected: tuple[int, ...], where: str) -> None:
    if tuple(tensor.shape) != expected:
        raise UserError(
            f"{where} is {list(tensor.shape)}, its config.json asks for {list(expected)}"
        )
    if not tensor.is_floating_point():
        raise UserError(f"{where} is of {tensor.dtype}: quantised weights cannot be read")
    if not torch.isfinite(tensor).all():
        raise UserError(f"{where} holds numbers that are not finite; use another copy or model")


def _is_stored_transposed(ours: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and ours.startswith("decoder.layers.")


def _swap_outer(tensor: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Rows [outer x inner x head_dim, ...] in the order [inner x outer x head_dim, ...]."""
    return tensor.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def _unfit(where: str, field: str, value: object, reason: str) -> UserError:
    return UserError(
        f"{where}: field {field} {value!r}: {reason}; no model here can compute as it says, "
        "use another"
    )
