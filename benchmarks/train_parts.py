"""Parts of a training step on a GPU: attention by kernel and head padding, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

from benchmarks.device_timing import milliseconds
from megatron_chameleon.model.cross_entropy import chunked_cross_entropy
from megatron_chameleon.model.sizes import model_size

KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
PADDED_TO = {"684m": (None, 56, 64), "1.2b": (None,), "124m": (None,)}
TOKENS = 16_384


def parts() -> dict[str, Callable[[], dict[str, Any]]]:
    """Functions that measure rows of milliseconds, forward and backward together."""

    def row(what: str, measure: Callable[[], dict[str, float | str]]) -> dict[str, Any]:
        milliseconds = measure()
        print(what, milliseconds, flush=True)
        return {"what": what, "milliseconds": milliseconds}

    measured: dict[str, Callable[[], dict[str, float | str]]] = {
        f"attention of {name}": partial(_attention, name, widths)
        for name, widths in PADDED_TO.items()
    }
    measured[f"loss of {TOKENS} tokens, bf16 logits"] = _loss
    return {what: partial(row, what, measure) for what, measure in measured.items()}


def _attention(size_name: str, widths: tuple[int | None, ...]) -> dict[str, float | str]:
    size = model_size(size_name)
    shape = (TOKENS // 1024, size.num_attention_heads, 1024, size.head_dim)
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    found: dict[str, float | str] = {}
    for width in widths:
        padding = (width or size.head_dim) - size.head_dim

        def attend(padding: int = padding) -> None:
            query, key, value = (pad(x, (0, padding)) if padding else x for x in (q, k, v))
            context = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=size.head_dim**-0.5
            )
            context[..., : size.head_dim].sum().backward()

        for kernel in (*KERNELS, None):
            name = f"{kernel.name if kernel else 'as torch chooses'}, width {width or 'as it is'}"
            found[name] = _with_kernel(kernel, attend)
    return found


def _with_kernel(kernel: SDPBackend | None, attend: Callable[[], None]) -> float | str:
    if kernel is None:
        return milliseconds(attend)
    try:
        with sdpa_kernel(kernel):
            return milliseconds(attend)
    except RuntimeError as error:  # this kernel does not support the head size
        return str(error).splitlines()[0]


def _loss() -> dict[str, float | str]:
    """Ours, torch's on a float32 copy, and the latter compiled, on full-width logits."""
    logits = torch.randn(TOKENS, 50_304, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(50_257, (TOKENS,), device="cuda")

    def torchs(x: torch.Tensor) -> torch.Tensor:
        return cross_entropy(x.float(), labels)

    losses: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "ours": lambda x: chunked_cross_entropy(x, labels, 50_257).mean(),
        "torch": torchs,
        "torch compiled": torch.compile(torchs, dynamic=False),
    }
    found: dict[str, float | str] = {}
    for name, loss in losses.items():

        def both_ways(loss: Callable[[torch.Tensor], torch.Tensor] = loss) -> None:
            loss(logits.requires_grad_() * 1).backward()

        found[name] = milliseconds(both_ways)
        logits.grad = None
    copy = milliseconds(lambda: logits.detach() * 1)
    found["of each: the copy that the backward pass may overwrite"] = copy
    return found
