"""Measure how much longer a training step takes with an online method.

    python benchmarks/online.py [--methods odm ado ...] [--size nano] [--seq-length 64]
                                [--global-batch-size 8] [--blocks 6] [--corpus CORPUS]

In one process, a run without an online method and a run with each method train the same model in
turn, one step each. A block is 100 steps of every run and holds one update of each mixture. The
overhead is the ratio of the medians over blocks, minus 1, without the forward passes of Chameleon
and Aioli; its 95% interval is that of a bootstrap over blocks. Times are CPU times of the process,
which other load on the machine changes little, or those of the clock on a GPU. The default corpus
has three domains and a small vocabulary, whose steps are short. Results are written to
benchmarks/results/online-DEVICE.json.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.measure import device_file, machine, put_row
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.blend.sampler import read_ahead
from megatron_chameleon.methods.online.options import OnlineOptions, find_online_methods, hook_class
from megatron_chameleon.parallel.layout import Layout, device_name, distributed
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training.checkpointing import find_progress
from megatron_chameleon.training.hook import build_hook
from megatron_chameleon.training.options import (
    OptimizerOptions,
    PretrainOptions,
    ValidationOptions,
)
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.records import RunRecords
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.trainer import Trainer
from tests.small_corpus import write_small_corpus

BLOCK, RESAMPLES = 100, 2000
NEVER = 10**9
PLAIN = "none"
# Methods of hooks that run the model forward only.
FORWARD_PASSES = ("_embed", "_losses")


class Run:
    """A run that is trained step by step.

    Args:
        options: options of the run.
        layout: layout of the only rank.

    Attributes:
        seconds: time of all steps, without the method's own forward passes.
    """

    def __init__(self, options: PretrainOptions, layout: Layout) -> None:
        plan = plan_training(options)
        hook = build_hook(hook_class(options.online.online), plan, layout)
        progress = find_progress(plan, layout)
        records = RunRecords(plan, layout, plan.samples(plan.schedule), progress, hook)
        self.trainer = Trainer(records, StopRequests(options.stopping))
        self.device, self.seconds = layout.device, 0.0
        for name in FORWARD_PASSES:
            if hasattr(hook, name):
                setattr(hook, name, self._left_out(getattr(hook, name)))

    def _clock(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def _left_out(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward``, whose time is subtracted from that of the steps."""

        def timed(*arguments: object) -> Any:
            begin = self._clock()
            try:
                return forward(*arguments)
            finally:
                self.seconds -= self._clock() - begin

        return timed

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Read batches ahead within the block, as training does."""

        @contextlib.contextmanager
        def opened() -> Any:
            trainer = self.trainer
            with read_ahead(trainer.batches, self.device, trainer.prefetched) as batches:
                trainer.batches = trainer.phases.timed(batches, "data")
                yield

        return opened()

    def step(self) -> None:
        """Train for one more step."""
        begin = self._clock()
        self.trainer.run_step()
        self.seconds += self._clock() - begin


def online_options(method: str) -> OnlineOptions:
    """Options of ``method`` with one update in each block."""
    if method == PLAIN:
        return OnlineOptions()
    more = {"aioli_sweeps": 1} if method == "aioli" else {}  # the default sweeps take longer
    return OnlineOptions(online=method, online_interval=BLOCK, **more)  # type: ignore[arg-type]


def block_seconds(runs: dict[str, Run], blocks: int) -> dict[str, np.ndarray[Any, Any]]:
    """Time ``blocks`` blocks of every run, after a block that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for block in range(blocks + 1):
        for run in runs.values():
            run.seconds = 0.0
        order = list(runs.values())
        for _ in range(BLOCK):
            order.append(order.pop(0))
            for run in order:
                run.step()
        if block:
            for name, run in runs.items():
                found[name].append(run.seconds)
    return {name: np.array(seconds) for name, seconds in found.items()}


def overhead(own: np.ndarray[Any, Any], plain: np.ndarray[Any, Any]) -> dict[str, float]:
    """Ratio of the medians of block times, minus 1, and its 95% bootstrap interval."""
    rows = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    ratios = np.median(own[rows], axis=1) / np.median(plain[rows], axis=1) - 1
    low, high = np.quantile(ratios, (0.025, 0.975))
    ratio = np.median(own) / np.median(plain) - 1
    return {"overhead": float(ratio), "low": float(low), "high": float(high)}


def main() -> None:
    """Measure on one rank, and write a row per method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(find_online_methods())
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    parser.add_argument("--size", default="nano", help="model size")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--global-batch-size", type=int, default=8, help="sequences per step")
    parser.add_argument("--blocks", type=int, default=6, help=f"timed blocks of {BLOCK} steps")
    parser.add_argument("--corpus", type=Path, help="default: a small corpus of random text")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        corpus = arguments.corpus
        if corpus is None:
            corpus = root / "corpus"
            corpus.mkdir()
            write_small_corpus(corpus)
        layout = stack.enter_context(distributed(TrainingParallelOptions(), seed=0))
        runs = {}
        for method in (PLAIN, *arguments.methods):
            options = PretrainOptions(
                run_dir=root / method,
                corpus=corpus,
                model=arguments.size,
                train_iters=BLOCK * (arguments.blocks + 2),
                seq_length=arguments.seq_length,
                global_batch_size=arguments.global_batch_size,
                micro_batch_size=arguments.global_batch_size,
                log_interval=NEVER,
                save_interval=NEVER,
                optimizer=OptimizerOptions(lr_warmup_iters=10),
                data=DataOptions(permutation="epoch"),
                validation=ValidationOptions(eval_interval=0),
                online=online_options(method),
            )
            runs[method] = Run(options, layout)
            stack.enter_context(runs[method].reading())
        seconds = block_seconds(runs, arguments.blocks)
        name = device_name(layout.device)
        save = partial(put_row, device_file("online", name), machine() | {"device": name})
        step = float(np.median(seconds[PLAIN])) / BLOCK
        tokens = arguments.seq_length * arguments.global_batch_size
        for method in arguments.methods:
            row = overhead(seconds[method], seconds[PLAIN])
            print(
                f"{method}: {100 * row['overhead']:.2f}% of a step of {1000 * step:.1f} ms "
                f"(95% interval {100 * row['low']:.2f} to {100 * row['high']:.2f}%)",
                flush=True,
            )
            what = f"{method}, {arguments.size}, {tokens} tokens per step"
            save({"what": what, "blocks": arguments.blocks, "step_seconds": step, **row})
        runs.clear()
        gc.collect()


if __name__ == "__main__":
    main()
