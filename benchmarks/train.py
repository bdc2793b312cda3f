"""Training speed on this device, compared with a plain torch model of the same size.

    python benchmarks/train.py [--size 82m ...] [--peak-tflops T] [--seconds 540] [--compiled]
                               [--resume FILE]

On a GPU: 82m, 124m, 684m and 1.2b in bf16 at sequences 512 and 1024, every contestant at its
fastest micro-batch size, and the kernels of attention and loss. On a CPU: 82m at sequence 512 in
fp32 and bf16, a few interleaved steps; memory is not measured, and the plain model runs eagerly
without --compiled. Results are written to benchmarks/results/train-DEVICE.json after every row;
other rows there are kept, with their dates. The exit status is 75 if rows were skipped for lack of
time.

Speeds are of whole optimizer steps on random tokens. Model FLOPs exclude padding of heads and
vocabulary and count half of causal attention; MFU is their share of the dense bf16 peak.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GPU_SIZES = ("684m", "1.2b", "124m", "82m")
CPU_SIZES = ("82m",)
LEAST_REPEATS = 5
MICRO_BATCH_TOKENS = (8_192, 16_384, 32_768, 65_536)


def main() -> int:
    """Measure on one rank and write the results."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    import torch

    from benchmarks.measure import device_file, machine, measure_rows, put_row
    from megatron_chameleon.model.flops import dense_bf16_peak
    from megatron_chameleon.parallel.layout import device_name, distributed
    from megatron_chameleon.parallel.options import TrainingParallelOptions

    if arguments.compiled and torch.cuda.is_available():
        sys.exit("--compiled is for CPUs: on a GPU the plain model is always compiled")
    with distributed(TrainingParallelOptions(), seed=0) as layout:
        name = device_name(layout.device)
        on = machine() | {"device": name, "cuda": torch.version.cuda, "cudnn": cudnn_version()}
        print(f"{name}, torch {torch.__version__}; {torch.get_num_threads()} threads")
        tflops = arguments.peak_tflops
        arguments.peak = tflops * 1e12 if tflops else dense_bf16_peak(name)
        rows = (on_gpu if layout.device.type == "cuda" else on_cpu)(layout, arguments)
        save = partial(put_row, device_file("train", name), on)
        return measure_rows(rows, save, arguments.seconds, arguments.resume)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=GPU_SIZES, help="model sizes to measure")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of an unknown device")
    parser.add_argument("--seconds", type=float, default=540, help="start no row that ends later")
    parser.add_argument("--resume", type=Path, help="file of rows to skip; adds those measured")
    parser.add_argument(
        "--compiled", action="store_true", help="on a CPU, time the plain model compiled too"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed steps, 5 or more")
    arguments = parser.parse_args()
    if arguments.repeats < LEAST_REPEATS:
        parser.error(f"--repeats {arguments.repeats}: medians are of {LEAST_REPEATS} or more")
    return arguments


def cudnn_version() -> int | None:
    """CuDNN's version, which determines the attention kernel."""
    import torch

    return torch.backends.cudnn.version() if torch.cuda.is_available() else None


Rows = dict[str, Callable[[], dict[str, Any]]]


def on_cpu(layout: Any, arguments: argparse.Namespace) -> Rows:
    """Rows of the small case, interleaved: ours and the plain model, eager by default."""
    from benchmarks.train_contestants import Case, Contestant, Ours, Plain
    from benchmarks.train_timing import free_memory, timed_in_turn

    print("CPU: sequence 512 only, micro-batch 2, one micro-batch per step, interleaved")

    def row(case: Case) -> dict[str, Any]:
        contestants: dict[str, Contestant] = {
            "ours": Ours(case, layout),
            "plain": Plain(case, layout),
        }
        if arguments.compiled:
            contestants["plain compiled"] = Plain(case, layout, compiled=True)
        found = timed_in_turn(contestants, case, 2, arguments.peak, arguments.repeats)
        del contestants
        free_memory()
        return compared(case, found)

    sizes = arguments.size or CPU_SIZES
    cases = [Case(size, 512, bf16, 1024) for size in sizes for bf16 in (False, True)]
    return {str(case): partial(row, case) for case in cases}


def on_gpu(layout: Any, arguments: argparse.Namespace) -> Rows:
    """Rows of the kernels, and of every size and sequence length at the best micro-batch sizes."""
    from benchmarks.train_contestants import Case, Contestant, Ours, Plain
    from benchmarks.train_parts import parts
    from benchmarks.train_timing import timed_at_its_best

    def row(case: Case) -> dict[str, Any]:
        contestants: dict[str, Callable[[], Contestant]] = {
            "ours": lambda: Ours(case, layout),
            "ours compiled": lambda: Ours(case, layout, compiled=True),
            "plain compiled": lambda: Plain(case, layout, compiled=True),
        }
        if case.shape.size.head_dim % 64 and case.seq_length == 1024:
            contestants["ours compiled, heads padded to 64"] = lambda: Ours(
                case, layout, compiled=True, head_dim_multiple=64
            )
        found = {
            name: timed_at_its_best(
                make, case, MICRO_BATCH_TOKENS, arguments.peak, arguments.repeats
            )
            for name, make in contestants.items()
        }
        return compared(case, found)

    sizes = arguments.size or GPU_SIZES
    cases = [Case(size, length, True, 65_536) for length in (1024, 512) for size in sizes]
    return parts() | {str(case): partial(row, case) for case in cases}


def compared(case: Any, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Print and return a row; the ratio is of our fastest to the fastest plain model."""
    best = {
        side: max(
            (f["tokens_per_second"] for n, f in found.items() if n.startswith(side) and "mfu" in f),
            default=0.0,
        )
        for side in ("ours", "plain")
    }
    ratio = best["ours"] / best["plain"] if best["plain"] else None
    for name, f in found.items():
        print(f"{case} | {name:34} | {format_figures(f)}", flush=True)
    print(f"{case} | ours to plain: {ratio and round(ratio, 3)}", flush=True)
    return {"what": str(case), "ours_to_plain": ratio, "contestants": found}


def format_figures(figures: dict[str, Any]) -> str:
    """A contestant's figures on one line."""
    if "out_of_memory" in figures:
        return "out of memory"
    mfu, memory = figures["mfu"], figures.get("peak_memory_gb")
    return (
        f"micro-batch {figures['micro_batch_size']}, {figures['tokens_per_second']:,.0f} tokens/s, "
        f"{figures['model_tflops']:.2f} model TFLOP/s"
        + (f", MFU {mfu:.1%}" if mfu is not None else "")
        + (f", {memory:.1f} GB at most" if memory is not None else "")
    )


if __name__ == "__main__":
    sys.exit(main())
