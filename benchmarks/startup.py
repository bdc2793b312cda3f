"""Measure the start of training on 5,000 domains, on a disk that takes 2 ms to open or stat a file.

    python benchmarks/startup.py [--domains 5000] [--ranks 4] [--milliseconds 2]

The data sets are 10,000 small .bin and .idx files of --data-path, and a corpus that imports them.
A preloaded C library delays and counts the calls that open a file of the data sets or request its
size. Rows are printed and written, with a description of the machine, to
benchmarks/results/startup-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.measure import machine, put_row
from megatron_chameleon.artifacts.files import write_json
from megatron_chameleon.corpus.indexed import IndexedWriter
from tests.small_corpus import VOCAB_SIZE, word_tokenizer

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS, DOCUMENT_LENGTH = 40, 50
STEPS, GLOBAL_BATCH_SIZE, SEQ_LENGTH = 5000, 16, 64
CALLS = "opened", "sized"

# Every call that opens a file or requests its size by its path, as far as CPython uses them. The
# counters are in a file that the rank maps, too.
SLOW_FILES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
static const char *folder;
static long *counts, delay;
__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("SLOW_COUNTS"), *us = getenv("SLOW_MICROSECONDS");
  if (!path || !us) return;
  int fd = open(path, O_RDWR);
  if (fd < 0) return;
  counts = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  delay = 1000 * atol(us);
  folder = getenv("SLOW_FOLDER");
}
static void wait_for(const char *path, int call) {
  if (!folder || !path || strncmp(path, folder, strlen(folder))) return;
  __atomic_add_fetch(counts + call, 1, __ATOMIC_RELAXED);
  struct timespec pause = {0, delay};
  nanosleep(&pause, NULL);
}
#define NEXT(name) ((int (*)())dlsym(RTLD_NEXT, #name))
#define OPEN(name) int name(const char *path, int flags, ...) { \
  va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
  wait_for(path, 0); return NEXT(name)(path, flags, mode); }
#define OPENAT(name) int name(int at, const char *path, int flags, ...) { \
  va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
  wait_for(path, 0); return NEXT(name)(at, path, flags, mode); }
#define STAT(name) int name(const char *path, void *found) { \
  wait_for(path, 1); return NEXT(name)(path, found); }
#define STATAT(name) int name(int at, const char *path, void *found, int flags) { \
  wait_for(path, 1); return NEXT(name)(at, path, found, flags); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
STAT(stat) STAT(stat64) STAT(lstat) STAT(lstat64) STATAT(fstatat) STATAT(fstatat64)
int access(const char *path, int mode) { wait_for(path, 1); return NEXT(access)(path, mode); }
"""


def main() -> None:
    """Write the data sets, and measure a run on each form of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--domains", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--milliseconds", type=float, default=2.0)
    options = parser.parse_args()
    on = machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = write_data_sets(folder, options.domains)
        library = folder / "slow_files.so"
        compiler = ["cc", "-shared", "-fPIC", "-w", "-O1", "-x", "c", "-", "-o", str(library)]
        subprocess.run([*compiler, "-ldl"], input=SLOW_FILES, text=True, check=True)
        for name, arguments in data.items():
            row = {
                "what": f"start of {options.ranks} ranks, {options.domains:,} domains of {name}, "
                f"{options.milliseconds:g} ms per call",
                **measure(folder, library, name, arguments, options),
            }
            print(row, flush=True)
            path = put_row("startup-cpu", on, row)
    print(f"written to {path}")


def write_data_sets(folder: Path, domains: int) -> dict[str, list[str]]:
    """Write the domains; return the arguments that select them, by the form of the data sets."""
    rng, words = np.random.default_rng(0), []
    (folder / "tokens").mkdir()
    for number in range(domains):
        prefix = folder / "tokens" / f"domain{number:05}"
        writer = IndexedWriter(prefix, "uint16")
        for _ in range(DOCUMENTS):
            writer.add(rng.integers(0, VOCAB_SIZE, DOCUMENT_LENGTH, dtype=np.uint16))
        writer.finish()
        prefix.with_name(f"{prefix.name}.xxh3").unlink()  # Megatron's data sets have no such file
        words += ["1", str(prefix)]
    (folder / "data_args.txt").write_text(" ".join(words))
    tokenizer = word_tokenizer(folder / "tokenizer.json")
    arguments = ["--data-args-path", str(folder / "data_args.txt")]
    arguments += ["--tokenizer-model", str(tokenizer), "--split", "90,10,0"]
    command = [sys.executable, str(ROOT / "tools" / "import_corpus.py"), *arguments]
    corpus = folder / "corpus"
    subprocess.run([*command, "--output", str(corpus)], check=True, stdout=subprocess.DEVNULL)
    return {"--data-path": arguments, "an imported corpus": ["--corpus", str(corpus)]}


def measure(
    folder: Path, library: Path, name: str, arguments: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Train one step under torchrun; return seconds and calls of rank 0 and of the others."""
    results = folder / name.replace(" ", "-")
    results.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    command += [str(options.ranks), __file__, "--results", str(results), "--", *arguments]
    command += ["--run-dir", str(results / "run"), "--model", "nano"]
    command += ["--train-iters", str(STEPS), "--seq-length", str(SEQ_LENGTH)]
    command += ["--global-batch-size", str(GLOBAL_BATCH_SIZE), "--micro-batch-size", "1"]
    command += ["--eval-interval", str(STEPS), "--eval-iters", "1", "--lr-warmup-iters", "0"]
    slow = {
        "SLOW_LIBRARY": str(library),
        "SLOW_FOLDER": str(folder / "tokens"),
        "SLOW_MICROSECONDS": str(round(1000 * options.milliseconds)),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(command, env={**os.environ, **slow}, check=True, stdout=subprocess.DEVNULL)
    ranks = [json.loads((results / f"rank{r}.json").read_text()) for r in range(options.ranks)]
    most = {
        moment: {call: max(rank[moment][call] for rank in ranks[1:]) for call in CALLS}
        for moment in ranks[0]
    }
    return {"rank 0": ranks[0], "most of any other rank": most}


def run_rank(results: Path, arguments: list[str]) -> None:
    """Train as one rank under torchrun, in a process with the preloaded library."""
    rank = os.environ["RANK"]
    counts = results / f"counts{rank}"
    if "LD_PRELOAD" not in os.environ:  # torchrun's own process is not measured
        counts.write_bytes(bytes(mmap.PAGESIZE))
        environment = {"LD_PRELOAD": os.environ["SLOW_LIBRARY"], "SLOW_COUNTS": str(counts)}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})
    from megatron_chameleon.cli import parse_options
    from megatron_chameleon.training import trainer
    from megatron_chameleon.training.options import PretrainOptions

    options = parse_options(PretrainOptions, arguments)
    found: dict[str, dict[str, float]] = {}
    begin = time.perf_counter()

    def note(moment: str) -> None:
        numbers = np.fromfile(counts, np.int64, len(CALLS)).tolist()
        seconds = round(time.perf_counter() - begin, 1)
        found.setdefault(moment, {**dict(zip(CALLS, numbers, strict=True)), "seconds": seconds})

    class Measured(trainer.Trainer):
        def run(self) -> None:
            note("before the first step")
            super().run()

        def run_step(self) -> None:
            super().run_step()
            note("after the first step")
            self.records.stopped_by = "the benchmark"

    with mock.patch.object(trainer, "Trainer", Measured):
        trainer.pretrain(options)
    write_json(results / f"rank{rank}.json", found)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(Path(sys.argv[2]), sys.argv[4:])
    else:
        main()
