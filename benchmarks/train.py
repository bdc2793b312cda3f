"""Training speed on the device there is, beside a plain torch model of the same size.

    python benchmarks/train.py [--size 82m ...] [--peak-tflops T] [--seconds 540] [--compiled]

On a GPU: 82m, 124m, 684m and 1.2b in bf16 at sequences 512 and 1024, every contestant at the
micro-batch that is best for it, and the kernels of attention and loss. On a CPU: 82m at sequence
512 in fp32 and bf16, a few steps, the contestants in turn; memory is not measured there, and the
plain model runs eagerly unless --compiled is given. What --seconds leave no time for is said.
Results are written to benchmarks/results/train-DEVICE.json after every row; rows that are not
measured this time stay there, each with its date.

Speeds are of whole optimizer steps on random tokens. Model FLOPs leave out padding of heads and
vocabulary and count half of causal attention; MFU is their share of the dense bf16 peak.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GPU_SIZES = ("684m", "1.2b", "124m", "82m")
CPU_SIZES = ("82m",)
LEAST_REPEATS = 5
MICRO_BATCH_TOKENS = (8_192, 16_384, 32_768, 65_536)


def main() -> None:
    """Measure on one rank, and write what was found."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    import torch

    from benchmarks.measure import device_file, machine, put_row
    from megatron_chameleon.options.parallel import TrainingParallelOptions
    from megatron_chameleon.parallel.layout import device_name, distributed

    if arguments.compiled and torch.cuda.is_available():
        sys.exit("--compiled is for CPUs: on a GPU the plain model is always compiled")
    with distributed(TrainingParallelOptions(), seed=0) as layout:
        name = device_name(layout.device)
        on = machine() | {"device": name, "cuda": torch.version.cuda, "cudnn": cudnn_version()}
        print(f"{name}, torch {torch.__version__}; {torch.get_num_threads()} threads")
        measure = on_gpu if layout.device.type == "cuda" else on_cpu
        measure(
            layout, Settings.of(arguments, name), partial(put_row, device_file("train", name), on)
        )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=GPU_SIZES, help="model sizes to measure")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of an unknown device")
    parser.add_argument("--seconds", type=float, default=540, help="start no row after so long")
    parser.add_argument(
        "--compiled", action="store_true", help="on a CPU, time the plain model compiled too"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed steps, 5 or more")
    arguments = parser.parse_args()
    if arguments.repeats < LEAST_REPEATS:
        parser.error(f"--repeats {arguments.repeats}: medians are of {LEAST_REPEATS} or more")
    return arguments


def cudnn_version() -> int | None:
    """CuDNN's version, which decides what attention runs."""
    import torch

    return torch.backends.cudnn.version() if torch.cuda.is_available() else None


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was asked for, as the rows need it."""

    sizes: Sequence[str] | None
    peak: float | None
    """Dense bf16 FLOP/s of the device."""
    repeats: int
    compiled: bool
    end: float
    """On time.perf_counter's clock: no row is begun after."""

    @classmethod
    def of(cls, arguments: argparse.Namespace, device: str) -> Settings:
        """From the command line."""
        from megatron_chameleon.model.device_peak import dense_bf16_peak

        given = arguments.peak_tflops
        return cls(
            sizes=arguments.size,
            peak=given * 1e12 if given else dense_bf16_peak(device),
            repeats=arguments.repeats,
            compiled=arguments.compiled,
            end=time.perf_counter() + arguments.seconds,
        )

    def in_time(self, cases: Iterable[Any]) -> Iterator[Any]:
        """The cases that there is time to begin; the others are said."""
        for case in cases:
            if time.perf_counter() < self.end:
                yield case
            else:
                print(f"left out for lack of time: {case}")


def on_cpu(layout: Any, settings: Settings, save: Callable[..., None]) -> None:
    """The small case, in turn: ours, and the plain model, eager unless asked otherwise."""
    from benchmarks.train_contestants import Case, Contestant, Ours, Plain
    from benchmarks.train_timing import free_memory, timed_in_turn

    print("CPU: sequence 512 only, micro-batch 2, one micro-batch a step, in turn")
    sizes = settings.sizes or CPU_SIZES
    cases = [Case(size, 512, bf16, 1024) for size in sizes for bf16 in (False, True)]
    for case in settings.in_time(cases):
        contestants: dict[str, Contestant] = {
            "ours": Ours(case, layout),
            "plain": Plain(case, layout),
        }
        if settings.compiled:
            contestants["plain compiled"] = Plain(case, layout, compiled=True)
        found = timed_in_turn(contestants, case, 2, settings.peak, settings.repeats)
        report(case, found, save)
        del contestants
        free_memory()


def on_gpu(layout: Any, settings: Settings, save: Callable[..., None]) -> None:
    """The kernels, then every size and sequence length."""
    from benchmarks.train_contestants import Case
    from benchmarks.train_parts import measure_parts

    for row in measure_parts():
        save(row)
    sizes = settings.sizes or GPU_SIZES
    cases = [Case(size, length, True, 65_536) for length in (1024, 512) for size in sizes]
    for case in settings.in_time(cases):
        report(case, one_gpu_case(case, layout, settings), save)


def one_gpu_case(case: Any, layout: Any, settings: Settings) -> dict[str, dict[str, Any]]:
    """All contestants, each at the micro-batch that is best for it, one after the other."""
    from benchmarks.train_contestants import Contestant, Ours, Plain
    from benchmarks.train_timing import timed_at_its_best

    contestants: dict[str, Callable[[], Contestant]] = {
        "ours": lambda: Ours(case, layout),
        "ours compiled": lambda: Ours(case, layout, compiled=True),
        "plain compiled": lambda: Plain(case, layout, compiled=True),
    }
    if case.shape.size.head_dim % 64 and case.seq_length == 1024:
        contestants["ours compiled, heads padded to 64"] = lambda: Ours(
            case, layout, compiled=True, head_dim_multiple=64
        )
    return {
        name: timed_at_its_best(make, case, MICRO_BATCH_TOKENS, settings.peak, settings.repeats)
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
    for name, f in found.items():
        print(f"{case} | {name:34} | {told(f)}", flush=True)
    print(f"{case} | ours to plain: {ratio and round(ratio, 3)}", flush=True)
    save({"what": str(case), "ours_to_plain": ratio, "contestants": found})


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
