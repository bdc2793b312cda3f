"""The weights of several models stacked, and one computation for all of them.

Member e of a stack is the model of model/gpt.py with the weights ``name[e]`` for each ``name`` of
GPTModel's parameters. Products of members are batched ones, so that many small kernels become one,
and no value of one member enters another's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from megatron_chameleon.methods.swarm.head import losses_and_gradients, losses_of
from megatron_chameleon.model.gpt import padded_vocab_size
from megatron_chameleon.model.initialization import WORD_EMBEDDINGS, draw_matrix
from megatron_chameleon.model.sizes import ModelShape

Stack = dict[str, torch.Tensor]

POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm"


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of one member's tensor, in the order of GPTModel's parameters."""
    h, f = shape.size.hidden_size, shape.size.ffn_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        WORD_EMBEDDINGS: (padded_vocab_size(shape.vocab_size, 1), h),
        POSITION_EMBEDDINGS: (shape.max_sequence_length, h),
    }
    of_layer = {
        "input_layernorm": (h,),
        "self_attention.linear_proj": (h, h),
        "self_attention.linear_qkv": (3 * h, h),
        "pre_mlp_layernorm": (h,),
        "mlp.linear_fc1": (f, h),
        "mlp.linear_fc2": (h, f),
    }
    layers = range(shape.size.num_layers)
    parts = {f"decoder.layers.{layer}.{k}": v for layer in layers for k, v in of_layer.items()}
    for name, sizes in {**parts, FINAL_NORM: (h,)}.items():
        shapes |= {f"{name}.weight": sizes, f"{name}.bias": sizes[:1]}
    return shapes


def initial_weights(shape: ModelShape, seeds: Sequence[int], device: torch.device) -> Stack:
    """Name -> [E, ...] float32: what ``build_model`` begins with for each of ``seeds`` [E]."""
    stack = {}
    for name, sizes in parameter_shapes(shape).items():
        whole = torch.zeros(len(seeds), *sizes, device=device)
        if len(sizes) == 2:
            for member, seed in enumerate(seeds):
                whole[member] = draw_matrix(name, *sizes, shape, seed)
        elif name.endswith("layernorm.weight"):
            whole.fill_(1.0)
        stack[name] = whole
    return stack


class StackedGPT:
    """E models in training: their weights in float32, and the gradients of these.

    With ``bf16`` the passes compute in bfloat16 with copies of the weights, made anew by
    :meth:`begin_step`, and gradients are summed up in float32.

    Args:
        shape: of each member.
        weights: name -> [E, ...] float32, as of :func:`initial_weights`.
        bf16: compute in bfloat16.

    Attributes:
        weights: the parameters, which the optimizer changes; ``.grad`` is always there.
    """

    def __init__(self, shape: ModelShape, weights: Mapping[str, torch.Tensor], *, bf16: bool):
        self.shape, self.bf16 = shape, bf16
        self.weights = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
        for parameter in self.weights.values():
            parameter.grad = torch.zeros_like(parameter)
        self.num_members = self.weights[WORD_EMBEDDINGS].size(0)
        self._used: Stack = dict(self.weights)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the gradients, and compute with the weights as they are now."""
        torch._foreach_zero_([self._gradient(name) for name in self.weights])
        if self.bf16:
            self._used = {
                name: parameter.detach().bfloat16().requires_grad_()
                for name, parameter in self.weights.items()
            }

    def forward_backward(
        self, tokens: torch.Tensor, labels: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Add the gradients of ``scale`` times the summed losses to the weights' own.

        Args:
            tokens: [E, b, s] int64.
            labels: [E, b, s] int64.
            scale: what each token counts.

        Returns:
            [E] float32, the sums of the losses in nats, without ``scale``.
        """
        embedded = self._embed(tokens).requires_grad_()  # [E, n, h]
        hidden = hidden_states(self._used, self.shape, embedded, tokens.size(-1))
        losses, of_hidden = losses_and_gradients(
            hidden.detach(),
            self._used[WORD_EMBEDDINGS].detach(),
            labels.flatten(1),
            self.shape.vocab_size,
            scale,
            self._gradient(WORD_EMBEDDINGS),
        )
        hidden.backward(of_hidden)
        assert embedded.grad is not None
        self._add_to_embeddings(tokens, embedded.grad)
        self._add_from_copies()
        return losses.sum(1)

    @torch.no_grad()
    def token_losses(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[E, b, s] float32 losses in nats.

        Args:
            tokens: [E, b, s] int64, or [1, b, s] for all members alike.
            labels: likewise.
        """
        tokens = tokens.expand(self.num_members, -1, -1)
        labels = labels.expand(self.num_members, -1, -1)
        hidden = hidden_states(self._used, self.shape, self._embed(tokens), tokens.size(-1))
        losses = losses_of(
            hidden, self._used[WORD_EMBEDDINGS], labels.flatten(1), self.shape.vocab_size
        )
        return losses.view(tokens.shape)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[E, n, h] of ``tokens`` [E, b, s], without a graph: its gradient is added by hand.

        Autograd's would be a second tensor as large as all embeddings, for every pass.
        """
        words = self._used[WORD_EMBEDDINGS].detach().flatten(0, 1)  # [E * v, h]
        positions = self._used[POSITION_EMBEDDINGS].detach()[:, None, : tokens.size(-1)]
        embedded = words[self._rows(tokens)].view(*tokens.shape, -1) + positions
        return embedded.flatten(1, 2)

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """[E * b * s] int64: where each token's vector lies among those of all members."""
        first = torch.arange(self.num_members, device=tokens.device) * self._vocabulary_rows
        return (tokens + first[:, None, None]).flatten()

    @torch.no_grad()
    def _add_to_embeddings(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the ``gradient`` [E, n, h] of what was embedded to both tables'."""
        of_tokens = gradient.float().flatten(0, 1)
        words = self._gradient(WORD_EMBEDDINGS).view(-1, gradient.size(-1))
        words.index_add_(0, self._rows(tokens), of_tokens)
        of_positions = of_tokens.view(*tokens.shape, -1).sum(1)  # [E, s, h]
        self._gradient(POSITION_EMBEDDINGS)[:, : tokens.size(-1)] += of_positions

    @torch.no_grad()
    def _add_from_copies(self) -> None:
        """Move the gradients of bfloat16 copies to the weights'; in float32 they are there."""
        for name, copy in self._used.items():
            if self.bf16 and copy.grad is not None:
                self._gradient(name).add_(copy.grad)
                copy.grad = None

    def _gradient(self, name: str) -> torch.Tensor:
        gradient = self.weights[name].grad
        assert gradient is not None
        return gradient

    @property
    def _vocabulary_rows(self) -> int:
        return self.weights[WORD_EMBEDDINGS].size(1)


def hidden_states(
    weights: Mapping[str, torch.Tensor],
    shape: ModelShape,
    embedded: torch.Tensor,
    seq_length: int,
) -> torch.Tensor:
    """[E, b * s, h] after the last layer norm, of ``embedded`` [E, b * s, h]."""
    x = embedded
    for layer in range(shape.size.num_layers):
        name = f"decoder.layers.{layer}"
        normed = _layer_norm(x, weights, f"{name}.input_layernorm")
        x = x + _attention(normed, weights, f"{name}.self_attention", shape, seq_length)
        normed = _layer_norm(x, weights, f"{name}.pre_mlp_layernorm")
        inner = gelu(_linear(normed, weights, f"{name}.mlp.linear_fc1"))
        x = x + _linear(inner, weights, f"{name}.mlp.linear_fc2")
    return _layer_norm(x, weights, FINAL_NORM)


def _attention(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    name: str,
    shape: ModelShape,
    seq_length: int,
) -> torch.Tensor:
    """Causal self-attention of ``x`` [E, b * s, h]; rows of the projection are head by head."""
    heads, width = shape.size.num_attention_heads, shape.size.head_dim
    projected = _linear(x, weights, f"{name}.linear_qkv")
    by_head = projected.view(-1, seq_length, heads, 3 * width).transpose(1, 2)  # [E*b, n, s, 3d]
    query, key, value = by_head.split(width, dim=-1)
    context = scaled_dot_product_attention(query, key, value, is_causal=True)
    return _linear(context.transpose(1, 2).reshape(x.shape), weights, f"{name}.linear_proj")


def _linear(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """[E, n, o] of ``x`` [E, n, i], each member by its own weights [o, i] and biases [o]."""
    bias = weights[f"{name}.bias"][:, None]
    return torch.baddbmm(bias, x, weights[f"{name}.weight"].transpose(1, 2))


def _layer_norm(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """LayerNorm of ``x`` [E, n, h], each member by its own scale and shift [h]."""
    normed = layer_norm(x, x.shape[-1:])
    return torch.addcmul(
        weights[f"{name}.bias"][:, None], normed, weights[f"{name}.weight"][:, None]
    )
