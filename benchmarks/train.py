"""Training speed on the device there is, beside a plain torch model of the same size.

    python benchmarks/train.py [--size 82m ...] [--peak-tflops T] [--seconds 540] [--compiled]

On a GPU: 82m, 124m, 684m and 1.2b in bf16 at sequences 512 and 1024, each at its best micro-batch,
and the kernels of attention and loss; within --seconds, what is left out is said. On a CPU: 82m at
sequence 512 in fp32 and bf16, a few steps, the contestants in turn; memory is not measured there,
and the plain model runs eagerly unless --compiled is given.
Results are written to benchmarks/results/train-DEVICE.json after every row.

Speeds are of whole optimizer steps on random tokens. Model FLOPs leave out padding of heads and
vocabulary and count half of causal attention; MFU is their share of the dense bf16 peak.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GPU_SIZES = ("684m", "1.2b", "124m", "82m")
# What was set out to reach on one H200 at sequence 1024.
GOALS = {"684m": {"mfu": 0.50}, "1.2b": {"mfu": 0.52}, "124m": {"tokens_per_second": 500_000}}
MICRO_BATCH_TOKENS = (8_192, 16_384, 32_768, 65_536)


def main() -> None:
    """Measure on one rank, and write what was found."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    import torch

    from benchmarks.measure import machine
    from megatron_chameleon.options.parallel import TrainingParallelOptions
    from megatron_chameleon.parallel.layout import device_name, distributed

    with distributed(TrainingParallelOptions(), seed=0) as layout:
        name = device_name(layout.device)
        on = machine() | {"device": name, "cuda": torch.version.cuda, "cudnn": cudnn_version()}
        print(f"{name}, torch {torch.__version__}; {torch.get_num_threads()} threads")
        save = results_writer(name, on)
        measure = on_gpu if layout.device.type == "cuda" else on_cpu
        measure(layout, arguments, save)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=GPU_SIZES, help="model sizes to measure")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of an unknown device")
    parser.add_argument("--seconds", type=float, default=540, help="start no row after so long")
    parser.add_argument(
        "--compiled", action="store_true", help="on a CPU, time the plain model compiled too"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each contestant")
    return parser.parse_args()


def cudnn_version() -> int | None:
    """CuDNN's version, which decides what attention runs."""
    import torch

    return torch.backends.cudnn.version() if torch.cuda.is_available() else None


def results_writer(device: str, on: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """A function that adds a row to the device's results."""
    from benchmarks.measure import write_results

    name = "train-" + re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        write_results(name, rows, on)

    return add


def on_cpu(layout: Any, arguments: argparse.Namespace, save: Callable[..., None]) -> None:
    """The small case, in turn: ours, and the plain model, eager unless asked otherwise."""
    from benchmarks.train_contestants import Case, Contestant, Ours, Plain
    from benchmarks.train_timing import free_memory, timed_in_turn

    print("CPU: 82m at sequence 512 only, micro-batch 2, one micro-batch a step, in turn")
    for bf16 in (False, True):
        case = Case("82m", 512, bf16, tokens_per_step=1024)
        contestants: dict[str, Contestant] = {
            "ours": Ours(case, layout),
            "plain": Plain(case, layout),
        }
        if arguments.compiled:
            contestants["plain compiled"] = Plain(case, layout, compiled=True)
        found = timed_in_turn(contestants, case, 2, arguments.repeats)
        report(case, found, save)
        del contestants
        free_memory()


def on_gpu(layout: Any, arguments: argparse.Namespace, save: Callable[..., None]) -> None:
    """Every size and sequence length, then the kernels."""
    from benchmarks.train_contestants import Case
    from benchmarks.train_parts import measure_parts
    from megatron_chameleon.model.device_peak import dense_bf16_peak
    from megatron_chameleon.parallel.layout import device_name

    began = time.perf_counter()
    given = arguments.peak_tflops
    peak = given * 1e12 if given else dense_bf16_peak(device_name(layout.device))
    for row in measure_parts():
        save(row)
    for seq_length in (1024, 512):
        for size in arguments.size or GPU_SIZES:
            case = Case(size, seq_length, bf16=True, tokens_per_step=65_536)
            if time.perf_counter() - began > arguments.seconds:
                print(f"left out for lack of time: {case}")
                continue
            report(case, one_gpu_case(case, layout, peak, arguments.repeats), save)


def one_gpu_case(
    case: Any, layout: Any, peak: float | None, repeats: int
) -> dict[str, dict[str, Any]]:
    """All contestants at the micro-batch that is best for ours, one after the other."""
    from benchmarks.train_contestants import Ours, Plain
    from benchmarks.train_timing import best_micro_batch, free_memory, timed_alone

    searched = Ours(case, layout)
    micro_batch_size, speeds = best_micro_batch(searched, case, MICRO_BATCH_TOKENS)
    print(f"{case}: tokens/s by micro-batch { ({b: round(v) for b, v in speeds.items()}) }")
    del searched
    free_memory()
    contestants: dict[str, Callable[[], Any]] = {
        "ours": lambda: Ours(case, layout),
        "ours compiled": lambda: Ours(case, layout, compiled=True),
        "plain compiled": lambda: Plain(case, layout, compiled=True),
    }
    if case.shape.size.head_dim % 64 and case.seq_length == 1024:
        contestants["ours compiled, heads padded to 64"] = lambda: Ours(
            case, layout, compiled=True, head_dim_multiple=64
        )
    return {
        name: timed_alone(make, case, micro_batch_size, peak, repeats)
        for name, make in contestants.items()
    }


def report(case: Any, found: dict[str, dict[str, Any]], save: Callable[..., None]) -> None:
    """Print and save a row; the ratio is of our fastest to the fastest plain model."""
    best = {
        side: max(
            (f["tokens_per_second"] for n, f in found.items() if n.startswith(side) and "mfu" in f),
            default=0.0,
        )
        for side in ("ours", "plain")
    }
    ratio = best["ours"] / best["plain"] if best["plain"] else None
    goal = GOALS.get(case.size) if case.seq_length == 1024 else None
    for name, f in found.items():
        print(f"{case} | {name:34} | {told(f)}", flush=True)
    print(
        f"{case} | ours to plain: {ratio and round(ratio, 3)}; goal on an H200: {goal}", flush=True
    )
    save({"what": str(case), "ours_to_plain": ratio, "goal_h200": goal, "contestants": found})


def told(figures: dict[str, Any]) -> str:
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
    main()
