"""Compare masked means by Triton kernels and by torch with a GPU's memory bandwidth.

    python benchmarks/pooling.py

Hidden states [s, b, h] are in bf16; either all positions are valid, or lengths are random. Speeds
are bytes of valid states per second, and their ratio to the fastest read by torch. Results are
written to benchmarks/results/pooling-DEVICE.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn.functional import layer_norm

from benchmarks.measure import device_file, machine, milliseconds, put_row
from megatron_chameleon.embedding.pooling import FinalNorm, masked_mean

SHAPES = ((1024, 64, 768), (1024, 64, 1200), (512, 128, 768))
# Elements of the tensors that are read and copied: 2 GB each, far larger than caches.
LARGE = 1 << 30


def main() -> None:
    """Measure every shape and write the results."""
    if not torch.cuda.is_available():
        sys.exit("this measures CUDA kernels, and torch sees no CUDA device here")
    device = torch.cuda.get_device_name()
    rates = memory_rates()
    print(f"{device}: {', '.join(f'{name} {rate:,.0f} GB/s' for name, rate in rates.items())}")
    on = machine() | {"device": device, "cuda": torch.version.cuda, "gigabytes_per_second": rates}
    for shape in SHAPES:
        for full in (True, False):
            row = measure(shape, full, max(rates.values()))
            shares = row["share_of_fastest_read"]
            times = row["milliseconds"].items()
            parts = [f"{name} {ms:.3f} ms ({shares[name]:.0%})" for name, ms in times]
            print(f"{row['what']}: {', '.join(parts)}", flush=True)
            put_row(device_file("pooling", device), on, row)


def memory_rates() -> dict[str, float]:
    """GB/s of reading and of copying large tensors; a copy counts reads and writes."""
    source = torch.ones(LARGE, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    num_bytes = source.numel() * source.element_size()
    times = {
        "read": (num_bytes, source.max),
        "copied": (2 * num_bytes, lambda: target.copy_(source)),
    }
    return {name: size / 1e6 / milliseconds(run) for name, (size, run) in times.items()}


def measure(shape: tuple[int, int, int], full: bool, rate: float) -> dict[str, Any]:
    """Check that all contestants compute the same means, and time them."""
    length, rows, width = shape
    torch.manual_seed(0)
    states = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((rows,), length, device="cuda")
    if not full:
        lengths = torch.randint(1, length + 1, (rows,), device="cuda")
    weight, bias = torch.randn(2, width, device="cuda", dtype=torch.bfloat16)
    runs = contestants(states, lengths, weight, bias)
    expected = runs["torch"]().double(), runs["torch, norm"]().double()
    for name, run in runs.items():
        torch.testing.assert_close(
            run().double(), expected[name.endswith("norm")], atol=2e-2, rtol=2e-2, msg=name
        )
    times = {name: milliseconds(run) for name, run in runs.items()}
    num_bytes = int(lengths.sum()) * width * states.element_size()
    speeds = {name: num_bytes / 1e6 / time for name, time in times.items()}
    return {
        "what": f"{list(shape)} bf16, {'all valid' if full else 'random lengths'}",
        "milliseconds": times,
        "gigabytes_per_second": speeds,
        "share_of_fastest_read": {name: speed / rate for name, speed in speeds.items()},
    }


def contestants(
    states: torch.Tensor, lengths: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return our kernels and torch's operations, without and with the final norm."""
    width = states.size(2)
    norm = FinalNorm(weight, bias)

    def mean(hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.size(0), device=hidden.device)
        valid = (positions[:, None] < lengths)[:, :, None]
        return torch.where(valid, hidden.float(), 0.0).sum(0) / lengths[:, None]

    def normed_mean(hidden: torch.Tensor) -> torch.Tensor:
        return mean(layer_norm(hidden, (width,), weight, bias))

    compiled, normed_compiled = torch.compile(mean), torch.compile(normed_mean)
    return {
        "ours": lambda: masked_mean(states, lengths),
        "torch": lambda: mean(states),
        "torch compiled": lambda: compiled(states),
        "ours, norm": lambda: masked_mean(states, lengths, norm),
        "torch, norm": lambda: normed_mean(states),
        "torch compiled, norm": lambda: normed_compiled(states),
    }


if __name__ == "__main__":
    main()
