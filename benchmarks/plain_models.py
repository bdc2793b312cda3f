"""A GPT-2 and a Llama in plain torch, the baselines of the training benchmark.

The tensors are those of the public models. They are trained the way small single-GPU trainers are:
fp32 weights under bf16 autocast, torch.compile, scaled_dot_product_attention, fused AdamW.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu

from megatron_chameleon.model.config import ModelConfig

VOCABULARY_MULTIPLE = 64  # pads the embedding of 50,257 tokens to 50,304 rows


class GPTBlock(nn.Module):
    """One layer of GPT-2: LayerNorm and linear layers with biases, exact GELU."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        h, f = shape.hidden_size, shape.ffn_hidden_size
        self.heads = shape.num_attention_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(h), nn.LayerNorm(h)
        self.query_key_value, self.projection = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, f), nn.Linear(f, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply attention and MLP to hidden states ``x`` [b, s, h]; return the same shape."""
        b, s, h = x.shape
        parts = self.query_key_value(self.attention_norm(x)).split(h, dim=2)
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in parts)
        context = scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, n, s, d]
        x = x + self.projection(context.transpose(1, 2).reshape(b, s, h))
        return x + self.down(gelu(self.up(self.mlp_norm(x))))


class LlamaBlock(nn.Module):
    """One layer of Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        h, f = shape.hidden_size, shape.ffn_hidden_size
        self.head_dim = shape.kv_channels
        self.widths = shape.query_size, shape.key_size, shape.key_size
        self.attention_norm = nn.RMSNorm(h, eps=shape.layernorm_epsilon)
        self.mlp_norm = nn.RMSNorm(h, eps=shape.layernorm_epsilon)
        self.query_key_value = nn.Linear(h, sum(self.widths), bias=False)
        self.projection = nn.Linear(shape.query_size, h, bias=False)
        self.gate_up, self.down = nn.Linear(h, 2 * f, bias=False), nn.Linear(f, h, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Apply attention and MLP to ``x`` [b, s, h], with angles [s, head_dim / 2]."""
        b, s, _ = x.shape
        parts = self.query_key_value(self.attention_norm(x)).split(self.widths, dim=2)
        q, k, v = (part.view(b, s, -1, self.head_dim).transpose(1, 2) for part in parts)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        is_grouped = q.size(1) != k.size(1)
        context = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        x = x + self.projection(context.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=2)
        return x + self.down(silu(gate) * up)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + d / 2) of the last dimension of ``x`` [b, n, s, d]."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class PlainModel(nn.Module):
    """A whole GPT-2 or Llama; :meth:`forward` returns the mean loss."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        h = shape.hidden_size
        rows = -(-shape.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        self.tokens = nn.Embedding(rows, h)
        if shape.is_rotary:
            positions = torch.arange(shape.max_sequence_length)
            exponents = torch.arange(0, shape.kv_channels, 2) / shape.kv_channels
            angles = torch.outer(positions, shape.rotary_base**-exponents)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
        else:
            self.positions = nn.Embedding(shape.max_sequence_length, h)
        block = LlamaBlock if shape.is_rotary else GPTBlock
        self.blocks = nn.ModuleList(block(shape) for _ in range(shape.num_layers))
        norm = nn.RMSNorm if shape.normalization == "RMSNorm" else nn.LayerNorm
        self.norm = norm(h, eps=shape.layernorm_epsilon)
        self.head = nn.Linear(h, rows, bias=False)
        if not shape.untie_embeddings_and_output_weights:
            self.head.weight = self.tokens.weight
        self.is_rotary = shape.is_rotary
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of ``labels`` [b, s] given ``tokens`` [b, s]."""
        x, length = self.tokens(tokens), tokens.size(1)
        angles: tuple[torch.Tensor, ...] = ()
        if self.is_rotary:
            angles = self.cos[:length], self.sin[:length]
        else:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, *angles)
        return self.loss(x, labels)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of ``labels`` [b, s] for the last block's output ``x`` [b, s, h]."""
        logits = self.head(self.norm(x))
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    def compile_regions(self) -> None:
        """Compile the blocks, which share their code, and the output layer with the loss.

        The kernels are the same as if the whole model were compiled, which would take much longer.
        """
        for block in self.blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
        self.loss = torch.compile(self.loss, dynamic=False)  # type: ignore[method-assign]


def plain_optimizer(model: PlainModel) -> torch.optim.AdamW:
    """Fused AdamW, with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[dict[str, torch.Tensor]],
    *,
    bf16: bool,
) -> None:
    """One optimizer step over micro-batches, with the gradient's norm clipped at 1."""
    for batch in batches:
        with torch.autocast(batch["tokens"].device.type, torch.bfloat16, enabled=bf16):
            loss = model(batch["tokens"], batch["labels"])
        (loss / len(batches)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
