"""Resume runs with another release of megatron-core, and compare the losses with whole runs.

    python benchmarks/resume_across_releases.py .venv/bin/python .venv-core/bin/python

Each interpreter has one release. A small model is trained with each of them, on one rank, in
bfloat16, and on two ranks with the distributed optimizer. Then every other interpreter resumes each
run from its middle. Losses, gradient norms and learning rates of all steps must be equal bit for
bit. Results are merged into benchmarks/results/resume-across-releases.json, and printed as a table
in Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from install_matrix import ROOT, write_text

RESULTS = ROOT / "benchmarks/results/resume-across-releases.json"
STEPS, MIDDLE = 6, 3
LAYOUTS = {
    "1 rank": (1, []),
    "1 rank, bf16": (1, ["--bf16"]),
    "2 ranks, sharded": (2, ["--use-distributed-optimizer"]),
}
COMPARED = ("step", "loss", "domain_loss", "grad_norm", "lr")
PREPARE = (
    "train_tokenizer --input a.jsonl b.jsonl --output t.json --vocab-size 300",
    "preprocess_data --input a=a.jsonl --input b=b.jsonl --tokenizer-model t.json --output corpus "
    "--min-tokens-per-split 1",
)
TRAIN = (
    "pretrain_gpt --corpus corpus --mixture uniform --model nano --seq-length 32 "
    f"--global-batch-size 4 --micro-batch-size 2 --train-iters {STEPS} --save-interval {MIDDLE} "
    "--lr-warmup-iters 1 --log-interval 1"
)


def main() -> int:
    """Train, resume and compare; return 1 if any run differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="+", help="interpreters with different releases")
    # Not resolved: the interpreter of a virtual environment is a link.
    pythons = [os.path.abspath(python) for python in parser.parse_args().pythons]
    releases = {release_of(python): python for python in pythons}
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary, "work")
        write_text(work)
        for command in PREPARE:
            run([pythons[0], "-m", "megatron_chameleon", *command.split()], work)
        for layout in LAYOUTS:
            whole = {
                release: train(work, python, f"{release} {layout}", layout)
                for release, python in releases.items()
            }
            for release, other in itertools.permutations(releases, 2):
                resumed = resume(work, releases[other], f"{release} {layout}", other, layout)
                row = {
                    "layout": layout,
                    "from": release,
                    "to": other,
                    "resumed_equals_whole": resumed == whole[release],
                    "whole_runs_are_equal": whole[release] == whole[other],
                }
                place = ("layout", "from", "to")
                rows = [old for old in rows if any(old[key] != row[key] for key in place)] + [row]
                print(f"{layout}: {release} to {other}: {row['resumed_equals_whole']}", flush=True)
    rows.sort(key=lambda row: (row["layout"], row["from"], row["to"]))
    RESULTS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print("| Layout | From | To | Resumed equals whole | Whole runs are equal |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(map(str, row.values()))} |")
    return int(not all(row["resumed_equals_whole"] for row in rows))


def release_of(python: str) -> str:
    """Return the release of megatron-core of an interpreter."""
    code = "from importlib.metadata import version; print(version('megatron-core'))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def train(work: Path, python: str, name: str, layout: str) -> list[dict[str, Any]]:
    """Train, or resume, the run called ``name``, and return its metrics of each step."""
    ranks, flags = LAYOUTS[layout]
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run([*launch, "-m", "megatron_chameleon", *TRAIN.split(), "--run-dir", name, *flags], work)
    lines = map(json.loads, (work / name / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in COMPARED} for line in lines if "grad_norm" in line]


def resume(work: Path, python: str, name: str, other: str, layout: str) -> list[dict[str, Any]]:
    """Resume a copy of the run from its middle, as after a crash; return its metrics."""
    copy = f"{name} resumed with {other}"
    shutil.copytree(work / name, work / copy)
    for folder in sorted((work / copy / "checkpoints").iterdir()):
        if not folder.name.endswith(f"{MIDDLE:08d}"):
            shutil.rmtree(folder)
    return train(work, python, copy, layout)


def run(command: list[str], work: Path) -> None:
    """Run a command in ``work`` on the CPU, with one thread."""
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        command, cwd=work, env={**os.environ, **variables}, capture_output=True, text=True
    )
    if done.returncode != 0:
        print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
