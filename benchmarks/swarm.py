"""A swarm's training speed on the device there is, beside one proxy after another.

    python benchmarks/swarm.py [--size 1m] [--members 8 ...] [--repeats 5] [--seconds 540]
                               [--resume FILE]

The proxies one after another are trained as tools/pretrain_gpt.py does it, at the micro-batch that
is best for them; the swarm by methods/swarm, at the pass that it would choose. Both take whole
optimizer steps on random tokens, GPT-2's vocabulary, in turn. What counts is tokens of all members
per second, the median over the repeats; the spread between repeats is told beside it, and a row
whose repeats differ by more than 1.5 times is marked as not settled: something else used the
device. Results are written to benchmarks/results/swarm-DEVICE.json after every row. The exit status
is 75 if rows were left out for lack of time.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Sequence length and sequences a step: RegMix's own batch, and small ones.
GPU_BATCHES = ((2048, 512), (2048, 16), (512, 8))
CPU_BATCHES = ((128, 1), (128, 8), (512, 4))
GPU_MICRO_BATCH_TOKENS = (16_384, 32_768, 65_536)
CPU_MICRO_BATCH_TOKENS = (128, 512, 1024)
# Repeats that differ by more than so many times tell of the machine, not of what is measured.
MOST_SPREAD = 1.5


def main() -> int:
    """Measure on one rank, and write what was found."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    import torch

    from benchmarks.measure import device_file, machine, measure_rows, put_row
    from benchmarks.train_contestants import Case
    from megatron_chameleon.options.parallel import ParallelOptions
    from megatron_chameleon.parallel.layout import device_name, distributed

    with distributed(ParallelOptions(), seed=0) as layout:
        on_gpu = layout.device.type == "cuda"
        name = device_name(layout.device)
        on = machine() | {"device": name, "threads": torch.get_num_threads()}
        print(f"{name}, torch {torch.__version__}; {torch.get_num_threads()} threads")
        save = partial(put_row, device_file("swarm", name), on)
        rows = {
            what: partial(measured, what, case, members, layout, arguments.repeats)
            for length, sequences in (GPU_BATCHES if on_gpu else CPU_BATCHES)
            for members in arguments.members or ((8, 32) if on_gpu else (4,))
            for case in [Case(arguments.size, length, on_gpu, length * sequences)]
            for what in [f"{case}, {sequences} sequences a step, {members} members"]
        }
        return measure_rows(rows, save, arguments.seconds, arguments.resume)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1m", help="model size of a member")
    parser.add_argument("--members", type=int, nargs="+", help="members at once")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps")
    parser.add_argument("--seconds", type=float, default=540, help="start no row that ends later")
    parser.add_argument("--resume", type=Path, help="file of rows to skip; adds those measured")
    return parser.parse_args()


def measured(what: str, case: Any, members: int, layout: Any, repeats: int) -> dict[str, Any]:
    """A row: tokens per second of both, and how many times the swarm's the others' are."""
    from benchmarks.train_contestants import Ours
    from benchmarks.train_timing import best_micro_batch, free_memory

    on_gpu = layout.device.type == "cuda"
    alone = Ours(case, layout)
    tried = GPU_MICRO_BATCH_TOKENS if on_gpu else CPU_MICRO_BATCH_TOKENS
    tried = tuple(tokens for tokens in tried if case.seq_length <= tokens <= case.tokens_per_step)
    size, _ = best_micro_batch(alone, case, tried or (case.seq_length,))
    swarm = SwarmSteps(case, members, layout)
    seconds = seconds_in_turn(alone, size, swarm, repeats)
    tokens = {"alone": case.tokens_per_step, "swarm": members * case.tokens_per_step}
    speeds = {name: tokens[name] / statistics.median(seconds[name]) for name in seconds}
    row = {
        "what": what,
        "repeats": repeats,
        "seconds": seconds,
        "tokens_per_second": speeds,
        "times_faster": speeds["swarm"] / speeds["alone"],
        "spread": {name: max(times) / min(times) for name, times in seconds.items()},
        "micro_batch_size": {"alone": size, "swarm": swarm.micro_batch_size},
    }
    print(told(row), flush=True)
    del alone, swarm
    free_memory()
    return row


def seconds_in_turn(
    alone: Any, micro_batch_size: int, swarm: SwarmSteps, repeats: int
) -> dict[str, list[float]]:
    """Seconds of ``repeats`` steps of both, in turn, each as often first as second."""
    from benchmarks.train_timing import step_seconds

    swarm.step()
    contestants: dict[str, Callable[[], float]] = {
        "alone": lambda: step_seconds(alone, micro_batch_size, warm_up=1, repeats=1)[0],
        "swarm": swarm.step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(repeats):
        for name in sorted(contestants, reverse=bool(number % 2)):
            seconds[name].append(contestants[name]())
    return seconds


def told(row: dict[str, Any]) -> str:
    """A row in a line, marked where its repeats differ too much to be believed."""
    speeds = ", ".join(
        f"{name} {speed:,.0f} tokens/s (repeats within {row['spread'][name]:.2f}x)"
        for name, speed in row["tokens_per_second"].items()
    )
    is_stable = max(row["spread"].values()) <= MOST_SPREAD
    mark = "" if is_stable else f"; NOT SETTLED, repeats differ by over {MOST_SPREAD}x"
    return f"{row['what']}: {speeds}; {row['times_faster']:.2f}x{mark}"


@dataclasses.dataclass
class SwarmSteps:
    """Optimizer steps of a group of members, as methods/swarm/group.py takes them."""

    case: Any
    members: int
    layout: Any

    def __post_init__(self) -> None:
        import torch

        from megatron_chameleon.methods.swarm.memory import (
            TOKENS_ON_CPU,
            TOKENS_ON_GPU,
            largest_divisor,
        )
        from megatron_chameleon.methods.swarm.optimizer import StackedAdamW, no_moments
        from megatron_chameleon.methods.swarm.stacked_gpt import StackedGPT, initial_weights
        from megatron_chameleon.options.training import OptimizerOptions

        device, case = self.layout.device, self.case
        enough = TOKENS_ON_GPU if device.type == "cuda" else TOKENS_ON_CPU
        most = max(1, enough // (self.members * case.seq_length))
        self.sequences = case.tokens_per_step // case.seq_length
        self.micro_batch_size = largest_divisor(self.sequences, most)
        weights = initial_weights(case.shape, range(self.members), device)
        self.model = StackedGPT(case.shape, weights, bf16=case.bf16)
        options = OptimizerOptions(lr=1e-4, min_lr=1e-5, lr_warmup_iters=0)
        self.optimizer = StackedAdamW(self.model.weights, options, 10**6, 0, no_moments(weights))
        self.generator = torch.Generator().manual_seed(0)

    def step(self) -> float:
        """Seconds of a step, the device waited for."""
        import torch

        sizes = (self.members, self.micro_batch_size, self.case.seq_length + 1)
        passes = self.sequences // self.micro_batch_size
        drawn = [
            torch.randint(self.case.shape.vocab_size, sizes, generator=self.generator)
            for _ in range(passes)
        ]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.model.begin_step()
        for text in drawn:
            on_device = text.to(self.layout.device)
            tokens, labels = on_device[..., :-1], on_device[..., 1:]
            self.model.forward_backward(tokens, labels, 1.0 / self.case.tokens_per_step)
        norms = self.optimizer.step()
        assert torch.isfinite(norms).all()
        return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
