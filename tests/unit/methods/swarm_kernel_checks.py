"""The stacked head through Triton's kernels, in the interpreter; prints its errors as JSON."""

from __future__ import annotations

import json
from unittest import mock

import torch

from megatron_chameleon.methods.swarm import head
from megatron_chameleon.parallel.triton_probe import has_kernels


def errors(dtype: torch.dtype, piece: int) -> float:
    """The largest difference of losses and gradients from the plain ones."""
    head.PIECE_ON_CPU = piece
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, 16, generator=generator)
    weight = torch.randn(3, 384, 16, generator=generator)
    labels = torch.randint(300, (3, 5), generator=generator)
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    expected = head.plain_losses(x, w, labels, 300)
    expected.sum().backward()
    of_weight = torch.zeros_like(weight)
    losses, of_hidden = head.losses_and_gradients(
        hidden.detach().to(dtype), weight.detach().to(dtype), labels, 300, 1.0, of_weight
    )
    assert x.grad is not None
    assert w.grad is not None
    pairs = ((losses, expected), (of_hidden.float(), x.grad), (of_weight, w.grad))
    return max(float((one - other).abs().max()) for one, other in pairs)


def main() -> None:
    """Whole members at once, and rows of one at a time."""
    assert not has_kernels(torch.ones(1))
    mock.patch("megatron_chameleon.model.cross_entropy.has_kernels", return_value=True).start()
    print(
        json.dumps(
            {
                f"{dtype} {piece}": errors(dtype, piece)
                for dtype in (torch.float32, torch.bfloat16)
                for piece in (384 * 2, 384 * 10, 1 << 20)
            }
        )
    )


if __name__ == "__main__":
    main()
