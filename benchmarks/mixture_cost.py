"""Time a mixture end to end: an 82m proxy trains 2000 steps of 128 samples, then embeds text.

    python benchmarks/mixture_cost.py [--seq-length 512] [--work FOLDER]

The training and the embedding tool run as commands; start-up and saving are part of the time. The
text is collected from the installed packages, as in the quickstart, in seven domains; it is small,
so training repeats it for many epochs, which does not change the time. For a domain with fewer than
4096 windows, the time of the missing windows is extrapolated. With --work the text is kept and an
interrupted run is resumed; the time before the interruption also counts.

On a CPU a few small steps and windows are timed, and the total is projected from their FLOP/s. The
paper reports 0.8 hours on an H100. Results are written to
benchmarks/results/mixture-cost-DEVICE.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.measure import device_file, machine, put_row
from megatron_chameleon.artifacts import Corpus, EmbeddingStore, TrainingRun
from megatron_chameleon.model.config import preset
from megatron_chameleon.model.flops import embedding_flops, training_flops
from megatron_chameleon.parallel.layout import device_name

TOOLS = Path(__file__).resolve().parent.parent / "tools"
SIZE = "82m"
VOCAB_SIZE = 50_257
NUM_DOMAINS, BYTES_PER_DOMAIN = 7, 16_000_000
STEPS, BATCH, WINDOWS = 2000, 128, 4096
"""As in the paper."""
PAPER_HOURS = 0.8


@dataclasses.dataclass(frozen=True)
class Scale:
    """Steps, batch and windows of the measured run."""

    steps: int
    batch: int
    micro_batch: int
    windows: int
    flags: tuple[str, ...]
    dtype: str
    """Compute precision of the embeddings."""


def main() -> None:
    """Run both tools, sum their time, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-length", type=int, default=1024, help="tokens per sample and window")
    parser.add_argument(
        "--micro-batch-size", type=int, default=64, help="sequences per forward pass on a GPU"
    )
    parser.add_argument(
        "--work", type=Path, help="working folder, kept to resume an interrupted run"
    )
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    name = device_name(torch.device("cuda" if has_gpu else "cpu"))
    on = machine() | {"device": name, "cuda": torch.version.cuda}
    scale = Scale(6, 4, 2, 8, (), "float32")  # enough to measure a CPU's speed
    if has_gpu:
        flags = ("--bf16", "--compile-layers")
        scale = Scale(STEPS, BATCH, arguments.micro_batch_size, WINDOWS, flags, "bfloat16")
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        prepare(work)
        row = measure(work, arguments.seq_length, scale)
    print(format_row(row))
    print(f"written to {put_row(device_file('mixture-cost', name), on, row)}")


def prepare(work: Path) -> None:
    """Write text, tokenizer and corpus unless they exist; this is not part of the cost."""
    text, tokenizer, corpus = work / "text", work / "tokenizer.json", work / "corpus"
    if not (text / "gathered.json").exists():
        counts = ("--num-domains", str(NUM_DOMAINS))
        most = ("--max-bytes-per-domain", str(BYTES_PER_DOMAIN))
        run("gather_installed_text.py", "--output-dir", str(text), *counts, *most)
    inputs = [f"--input={path.stem}={path}" for path in sorted(text.glob("*.jsonl"))]
    if not tokenizer.exists():
        vocabulary = ("--vocab-size", str(VOCAB_SIZE))
        run("train_tokenizer.py", *inputs, "--output", str(tokenizer), *vocabulary)
    if not (corpus / "corpus.json").exists():
        flags = ("--tokenizer-model", str(tokenizer), "--split", "98,1,1")
        run("preprocess_data.py", *inputs, "--output", str(corpus), *flags)


def run(tool: str, *arguments: str) -> float:
    """Run a tool of this project as a command on one rank; returns its wall seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    begin = time.perf_counter()
    subprocess.run(
        [*command, "--nproc-per-node", "1", str(TOOLS / tool), *arguments],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())},
    )
    return time.perf_counter() - begin


def measure(work: Path, seq_length: int, scale: Scale) -> dict[str, Any]:
    """Time both commands, and compute the total time at their speed."""
    corpus, proxy = work / "corpus", work / f"proxy-{seq_length}"
    output = work / f"mixture-{seq_length}.json"
    store_folder = work / f"embeddings-{seq_length}"
    resumed_at = TrainingRun.load(proxy).step if TrainingRun.exists(proxy) else 0
    before = EmbeddingStore.load(store_folder) if EmbeddingStore.exists(store_folder) else None
    embedded = before.cost.wall_seconds if before else 0.0
    train = run(
        *("pretrain_gpt.py", "--corpus", str(corpus), "--run-dir", str(proxy)),
        *("--model", SIZE, "--seq-length", str(seq_length)),
        *("--train-iters", str(scale.steps), "--global-batch-size", str(scale.batch)),
        *("--micro-batch-size", str(scale.micro_batch)),
        *("--lr-warmup-iters", str(min(500, scale.steps // 2))),
        *("--log-interval", str(max(1, scale.steps // 100))),
        *scale.flags,
    )
    weigh = run(
        *("compute_mixture.py", "--corpus", str(corpus), "--checkpoint", str(proxy)),
        *("--store", str(store_folder), "--output", str(output)),
        *("--num-windows", str(scale.windows), "--embedding-batch-size", str(scale.micro_batch)),
        *("--embedding-dtype", scale.dtype),
    )
    trained, store = TrainingRun.load(proxy), EmbeddingStore.load(store_folder)
    num_domains = len(Corpus.load(corpus).names)
    shape = preset(SIZE, VOCAB_SIZE, seq_length)
    speeds = [line["tokens_per_second"] for line in trained.metrics()]
    # The first line of the log includes the start-up.
    step = scale.batch * seq_length / statistics.median(speeds[1:])
    rates = {
        "training": training_flops(shape, scale.batch * seq_length, seq_length) / step,
        "embedding": store.cost.flops / store.cost.wall_seconds,
    }
    total_flops = {
        "training": training_flops(shape, STEPS * BATCH * seq_length, seq_length),
        "embedding": embedding_flops(
            shape, store.recipe.layer, num_domains * WINDOWS * seq_length, seq_length
        ),
    }
    around = {
        "training": train - (scale.steps - resumed_at) * step,
        "embedding": weigh - (store.cost.wall_seconds - embedded),
    }
    seconds = {part: around[part] + total_flops[part] / rates[part] for part in total_flops}
    return {
        "what": f"{SIZE}, sequence {seq_length}, {STEPS} steps of {BATCH}, "
        f"{num_domains} domains of {WINDOWS} windows",
        "hours": sum(seconds.values()) / 3600,
        "paper_hours": PAPER_HOURS,
        "is_projected": scale.steps < STEPS,
        "seconds": seconds,
        "seconds_outside_of_steps_and_windows": around,
        "flops": total_flops,
        "flops_per_second": rates,
        "measured": dataclasses.asdict(scale) | {"training": train, "embedding": weigh},
    }


def format_row(row: dict[str, Any]) -> str:
    """Format a row as the lines to print."""
    seconds, rates = row["seconds"], row["flops_per_second"]
    kind = "projected from a few steps and windows" if row["is_projected"] else "measured"
    return (
        f"\n{row['what']}: {row['hours']:.3f} hours, {kind} (paper: {row['paper_hours']})\n"
        f"  training {seconds['training']:.0f} s at {rates['training']:.2e} FLOP/s, "
        f"embedding {seconds['embedding']:.0f} s at {rates['embedding']:.2e} FLOP/s"
    )


if __name__ == "__main__":
    main()
