"""Measure a swarm's training speed for each number of members trained concurrently.

    python benchmarks/swarm.py [--size regmix-1m] [--members 1 2 4 8] [--steps 30] [--seconds 540]
                               [--resume FILE]

Each row trains one of these numbers of members concurrently on random tokens of GPT-2's vocabulary,
and reports the tokens per second of all members by their logs, without start-up. Results are
written to benchmarks/results/swarm-DEVICE.json after every row. The exit status is 75 if rows were
skipped for lack of time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Sequence length and sequences per step: RegMix's own batch, and small batches.
GPU_BATCHES = ((2048, 512), (2048, 16), (512, 8))
CPU_BATCHES = ((128, 8), (512, 4))


def main() -> int:
    """Measure every batch and number of members."""
    arguments = parse_arguments()
    import torch

    from benchmarks.measure import device_file, machine, measure_rows, put_row

    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    save = partial(put_row, device_file("swarm", device), machine() | {"device": device})
    rows = {
        what: partial(measured, what, arguments.size, members, length, sequences, arguments.steps)
        for length, sequences in (GPU_BATCHES if on_gpu else CPU_BATCHES)
        for members in arguments.members or ((1, 2, 4, 8) if on_gpu else (1, 2))
        for what in [f"{arguments.size}, {sequences} x {length} tokens per step, {members} members"]
    }
    return measure_rows(rows, save, arguments.seconds, arguments.resume)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="regmix-1m", help="model size of a member")
    parser.add_argument("--members", type=int, nargs="+", help="members trained concurrently")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each member")
    parser.add_argument("--seconds", type=float, default=540, help="time limit of all rows")
    parser.add_argument("--resume", type=Path, help="file of rows to skip; measured rows are added")
    return parser.parse_args()


def measured(
    what: str, size: str, members: int, length: int, sequences: int, steps: int
) -> dict[str, Any]:
    """Measure a row of results: tokens per second of all members together."""
    import numpy as np

    from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
    from megatron_chameleon.methods.swarm import SwarmOptions
    from megatron_chameleon.methods.swarm.train import train_swarm
    from tests.small_corpus import write_small_corpus

    options = SwarmOptions(
        model=size,
        train_iters=steps,
        seq_length=length,
        global_batch_size=sequences,
        members_at_once=members,
        lr_warmup_iters=1,
        eval_tokens=length,
        save_interval=0,
        log_interval=5,
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "corpus").mkdir()
        corpus = write_small_corpus(root / "corpus")
        mixtures = np.full((members, len(corpus.names)), 1 / len(corpus.names))
        train_swarm(options, corpus, mixtures, root / "swarm")
        logs = [
            [line["tokens_per_second"] for line in read_metrics(path / METRICS_NAME)][1:]
            for path in (root / "swarm" / "members").iterdir()
            if path.is_dir()
        ]
    speed = float(sum(np.median(speeds) for speeds in logs))
    print(f"{what}: {speed:,.0f} tokens/s", flush=True)
    return {"what": what, "tokens_per_second": speed}


if __name__ == "__main__":
    sys.exit(main())
