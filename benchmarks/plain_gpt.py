"""A GPT in plain torch, the baseline of the training benchmark.

The architecture and tensors are those of GPT-2: learned positions, tied embeddings, LayerNorm with
biases, exact GELU. It is trained the way small single-GPU trainers are: fp32 weights under bf16
autocast, torch.compile, scaled_dot_product_attention, fused AdamW.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from megatron_chameleon.model.config import ModelConfig

VOCABULARY_MULTIPLE = 64  # pads the embedding of 50,257 tokens to 50,304 rows


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, size: ModelConfig) -> None:
        super().__init__()
        h, f = size.hidden_size, size.ffn_hidden_size
        self.heads = size.num_attention_heads
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


class PlainGPT(nn.Module):
    """The complete model; :meth:`forward` returns the mean loss."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        rows = -(-shape.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        self.tokens = nn.Embedding(rows, shape.hidden_size)
        self.positions = nn.Embedding(shape.max_sequence_length, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.hidden_size)
        self.head = nn.Linear(shape.hidden_size, rows, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of ``labels`` [b, s] given ``tokens`` [b, s]."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
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


def plain_optimizer(model: PlainGPT) -> torch.optim.AdamW:
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
