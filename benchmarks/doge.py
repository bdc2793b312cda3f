"""The overhead of DoGE's reweighting of domain gradients on a training step.

    python benchmarks/doge.py [--size 82m] [--seq-length N] [--micro-batch-size N ...] [--repeats 5]

The same model and batches of 128 samples (as in the paper), sampled uniformly from 7 and from 17
domains: a plain optimizer step and one with DoGE's hook, interleaved. Samples have 512 tokens (as
in the paper) on a GPU, and 64 on a CPU, where 512 take minutes per step; with fewer tokens the
relative overhead is larger. The paper reports 1.7 and 2.5 times the time of a plain step. Results
are written to benchmarks/results/doge-DEVICE.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch

from benchmarks.measure import device_file, interleaved, machine, put_row
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.methods.doge.hook import GradientAlignment
from megatron_chameleon.mixture.doge import DogeRecipe, Roles
from megatron_chameleon.model.gpt import build_model_chunks
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.parallel.layout import Layout, device_name, distributed
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training.hook import HookRunner
from megatron_chameleon.training.optimizer import build_optimizer, build_scheduler, data_parallel
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.step import BatchShape, Passes, train_step

VOCAB_SIZE = 50_257  # of GPT-2's tokenizer
SAMPLES = 128
PAPERS_RATIO = {7: 1.7, 17: 2.5}
OPTIMIZER = OptimizerOptions(lr=1e-4, min_lr=1e-5, lr_warmup_iters=0)


@dataclasses.dataclass(frozen=True)
class Case:
    """The steps that are timed."""

    size: str
    seq_length: int
    micro_batch_size: int

    @property
    def shape(self) -> ModelShape:
        """The shape of the model."""
        return ModelShape(model_size(self.size), VOCAB_SIZE, self.seq_length)

    def __str__(self) -> str:
        return f"{self.size}, sequence {self.seq_length}, micro-batch {self.micro_batch_size}, bf16"


class Trained:
    """A model with its optimizer, and the two kinds of training steps."""

    def __init__(self, case: Case, layout: Layout) -> None:
        self._case, self._layout = case, layout
        chunks = build_model_chunks(case.shape, layout, seed=0, bf16=True, per_token_loss=True)
        self._chunks = data_parallel(chunks, layout, bf16=True)
        self._optimizer = build_optimizer(self._chunks, OPTIMIZER, layout, bf16=True)
        self._scheduler = build_scheduler(self._optimizer, OPTIMIZER, train_iters=10**6)
        count = SAMPLES // case.micro_batch_size
        self._batch_shape = BatchShape(count, case.micro_batch_size, case.seq_length)

    def plain_step(self) -> None:
        """A training step without a hook."""
        batches = random_batches(self._case, num_domains=1)
        passes = Passes(self._chunks, self._batch_shape, num_domains=1)
        self._step(lambda: passes.forward_backward(iter(batches)))

    def doge_step(self, num_domains: int) -> Callable[[], None]:
        """A function that runs a training step with DoGE on ``num_domains`` domains."""
        everything = tuple(range(num_domains))
        names = [f"domain {number}" for number in everything]
        hook = GradientAlignment(names, DogeRecipe(), Roles(everything, everything))
        passes = Passes(self._chunks, self._batch_shape, num_domains)
        hooked = HookRunner(hook, passes, self._case.shape, self._layout)

        def step() -> None:
            batches = random_batches(self._case, num_domains)
            self._step(lambda: hooked.forward_backward(iter(batches), 0, OPTIMIZER.lr))

        return step

    def _step(self, forward_backward: Callable[[], torch.Tensor]) -> None:
        result = train_step(self._chunks, self._optimizer, self._scheduler, forward_backward)
        assert math.isfinite(result.grad_norm)
        torch.cuda.synchronize()


def random_batches(case: Case, num_domains: int) -> list[Batch]:
    """A step's micro-batches of random tokens, with the domains in round-robin order."""
    generator = torch.Generator().manual_seed(0)
    b, s = case.micro_batch_size, case.seq_length
    text = torch.randint(VOCAB_SIZE, (SAMPLES, s + 1), generator=generator)
    domains = torch.arange(SAMPLES) % num_domains
    return [
        {
            "tokens": text[start : start + b, :-1].contiguous(),
            "labels": text[start : start + b, 1:].contiguous(),
            "loss_mask": torch.ones(b, s),
            "position_ids": torch.arange(s).repeat(b, 1),
            "domain": domains[start : start + b],
        }
        for start in range(0, SAMPLES, b)
    ]


def measured(case: Case, layout: Layout, repeats: int) -> dict[str, Any]:
    """A row: seconds, median time relative to a plain step, and memory."""
    trained = Trained(case, layout)
    steps = {"plain": trained.plain_step}
    memory = {"plain": taken_memory(trained.plain_step)}
    for count in PAPERS_RATIO:
        steps[f"{count} domains"] = trained.doge_step(count)
        memory[f"{count} domains"] = taken_memory(steps[f"{count} domains"])
    seconds = interleaved(steps, repeats)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "what": str(case),
        "tokens_per_step": SAMPLES * case.seq_length,
        "parameters": case.shape.num_parameters,
        "repeats": repeats,
        "seconds": seconds,
        "times_a_plain_step": {
            name: median / medians["plain"] for name, median in medians.items() if name != "plain"
        },
        "papers_times": {f"{count} domains": ratio for count, ratio in PAPERS_RATIO.items()},
        "memory_gb": memory,
    }


def taken_memory(step: Callable[[], None]) -> float:
    """GB: the peak allocation of a step on a GPU; the process's resident set after it on a CPU."""
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
    parser.add_argument("--seq-length", type=int, help="tokens per sample (512 on a GPU, 64 not)")
    parser.add_argument("--micro-batch-size", type=int, nargs="+", help="8 16 32 on a GPU, 8 not")
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
            print(f"{row['what']}: {ratios} a plain step; GB: {held}", flush=True)
            save(row)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
