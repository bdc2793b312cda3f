"""Measure how much longer a training step takes when DoGE reweights domain gradients.

    python benchmarks/doge.py [--size 82m] [--seq-length N] [--micro-batch-size N ...] [--repeats 5]

A plain optimizer step and a step with DoGE's hook are timed, interleaved, on the same model and
batches of 128 samples (as in the paper), sampled uniformly from 7 and from 17 domains. DoGE's steps
also compute the gradient of the held-out mix, 21 and 17 samples; in the authors' code, the mix is
part of the batch of 128. Samples have 512 tokens (as in the paper) on a GPU, and 64 on a CPU, where
512 take minutes per step; with fewer tokens the relative overhead is larger. The paper reports that
a step with DoGE takes 1.7 times as long as a plain step with 7 domains, and 2.5 times as long with
17. Results are written to benchmarks/results/doge-DEVICE.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch

from benchmarks.measure import device_file, interleaved, machine, put_row
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.methods.doge.compute import GradientAlignment, held_out_batch_size
from megatron_chameleon.mixture.doge import DogeRule, Roles
from megatron_chameleon.model.config import ModelConfig, preset
from megatron_chameleon.parallel.layout import Layout, device_name, distributed
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training.hook import HookRunner
from tests.random_training import OPTIMIZER, RandomTraining, random_batches

VOCAB_SIZE = 50_257  # the vocabulary size of GPT-2's tokenizer
SAMPLES = 128
PAPERS_RATIO = {7: 1.7, 17: 2.5}


@dataclasses.dataclass(frozen=True)
class Case:
    """Model size, sequence length and micro-batch size of the timed steps."""

    size: str
    seq_length: int
    micro_batch_size: int

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return preset(self.size, VOCAB_SIZE, self.seq_length)

    def __str__(self) -> str:
        return f"{self.size}, sequence {self.seq_length}, micro-batch {self.micro_batch_size}, bf16"


@dataclasses.dataclass(frozen=True)
class RandomText:
    """Random samples in place of the held-out mix."""

    seq_length: int

    def __len__(self) -> int:
        return sys.maxsize

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return as many random samples as ``indices``."""
        return next(random_batches(VOCAB_SIZE, len(indices), self.seq_length))


def steps_of(case: Case, layout: Layout) -> dict[str, Callable[[], None]]:
    """Training steps of one model: a plain step, and a DoGE step for each number of domains."""
    training = RandomTraining(case.config, layout, bf16=True, per_token_loss=True)
    num_microbatches = SAMPLES // case.micro_batch_size

    def make_step(num_domains: int, *, is_plain: bool = False) -> Callable[[], None]:
        passes = training.passes(num_microbatches, case.micro_batch_size, num_domains)
        everything = tuple(range(num_domains))
        names = [f"domain {number}" for number in everything]
        hook = GradientAlignment(
            names,
            DogeRule(),
            Roles(everything, (num_domains,)),
            RandomText(case.seq_length),
            held_out_batch_size(SAMPLES, num_domains, 1),
        )
        hooked = HookRunner(hook, passes, case.config, layout)

        def step() -> None:
            random = random_batches(VOCAB_SIZE, case.micro_batch_size, case.seq_length, num_domains)
            batches = itertools.islice(random, num_microbatches)
            if is_plain:
                training.step(lambda: passes.forward_backward(batches))
            else:
                training.step(lambda: hooked.forward_backward(batches, 0, OPTIMIZER.lr))
            torch.cuda.synchronize()

        return step

    steps = {"plain": make_step(1, is_plain=True)}
    return steps | {f"{count} domains": make_step(count) for count in PAPERS_RATIO}


def measured(case: Case, layout: Layout, repeats: int) -> dict[str, Any]:
    """Measure a row of results: seconds, median time relative to a plain step, and memory."""
    steps = steps_of(case, layout)
    memory = {name: taken_memory(step) for name, step in steps.items()}
    seconds = interleaved(steps, repeats)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "what": str(case),
        "tokens_per_step": SAMPLES * case.seq_length,
        "parameters": case.config.num_parameters,
        "repeats": repeats,
        "seconds": seconds,
        "times_a_plain_step": {
            name: median / medians["plain"] for name, median in medians.items() if name != "plain"
        },
        "papers_times": {f"{count} domains": ratio for count, ratio in PAPERS_RATIO.items()},
        "memory_gb": memory,
    }


def taken_memory(step: Callable[[], None]) -> float:
    """Return GB: peak allocation of ``step`` on a GPU; resident set after ``step`` on a CPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() / 1e9
    step()
    return float(psutil.Process().memory_info().rss) / 1e9


def main() -> None:
    """Measure on one rank and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="82m", help="model size (paper: 82m)")
    parser.add_argument("--seq-length", type=int, help="default: 512 on a GPU, 64 on CPU")
    parser.add_argument(
        "--micro-batch-size", type=int, nargs="+", help="default: 8 16 32; 8 on CPU"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each kind")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    with distributed(TrainingParallelOptions(), seed=0) as layout:
        name, on_gpu = device_name(layout.device), layout.device.type == "cuda"
        save = partial(put_row, device_file("doge", name), machine() | {"device": name})
        length = arguments.seq_length or (512 if on_gpu else 64)
        for micro_batch_size in arguments.micro_batch_size or ((8, 16, 32) if on_gpu else (8,)):
            row = measured(
                Case(arguments.size, length, micro_batch_size), layout, arguments.repeats
            )
            ratios = ", ".join(f"{k} {v:.2f}x" for k, v in row["times_a_plain_step"].items())
            held = ", ".join(f"{k} {v:.1f}" for k, v in row["memory_gb"].items())
            print(
                f"{row['what']}: {ratios} the time of a plain step; memory in GB: {held}",
                flush=True,
            )
            save(row)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
