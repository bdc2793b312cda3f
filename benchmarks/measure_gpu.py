"""Run the GPU tests and all benchmarks that measure a CUDA device, within 55 minutes on one GPU.

    python benchmarks/measure_gpu.py [--seconds 570] [--retry]

A step that fails or exceeds its time limit does not stop the others. The next call for the same
code skips finished steps; --retry reruns failed ones. Results are written to benchmarks/results,
logs and statuses to runs/measure-gpu. With several GPUs, there is another step of at most 7
minutes. Exit status: 75 while steps are left for another call, then 1 if one failed, else 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.process_tree import run_within
from megatron_chameleon.artifacts.files import write_json
from megatron_chameleon.errors import STOPPED_STATUS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    "*.py",
    *(f"{name}/**/*.py" for name in ("benchmarks", "megatron_chameleon", "tests", "tools")),
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A Python command and its time limit in seconds."""

    name: str
    arguments: tuple[str, ...]
    """``{folder}`` in an argument is replaced by the log folder of this version of the code."""
    seconds: int
    gpus: int = 1
    """Minimum number of GPUs."""


STEPS = (
    Step("doctor", ("tools/doctor.py",), 40),
    Step("test-kernels", ("benchmarks/gpu_tests.py", "kernels"), 210),
    Step("test-losses", ("benchmarks/gpu_tests.py", "losses"), 330),
    Step("test-runs", ("benchmarks/gpu_tests.py", "runs"), 220),
    Step("test-methods", ("benchmarks/gpu_tests.py", "methods"), 220),
    Step("test-several-gpus", ("benchmarks/gpu_tests.py", "several-gpus"), 420, gpus=2),
    Step("pooling", ("benchmarks/pooling.py",), 60),
    Step(
        "embedding",
        ("benchmarks/embedding.py", "--windows", "2048", "--window-length", "1024"),
        150,
    ),
    Step("doge", ("benchmarks/doge.py",), 120),
    Step(
        "swarm",
        ("benchmarks/swarm.py", "--seconds", "130", "--resume", "{folder}/swarm.rows"),
        160,
    ),
    Step(
        "train",
        ("benchmarks/train.py", "--seconds", "410", "--resume", "{folder}/train.rows"),
        440,
    ),
    Step(
        "train-documents",
        (
            *("benchmarks/train.py", "--documents", "--seconds", "410"),
            *("--resume", "{folder}/train-documents.rows"),
        ),
        440,
    ),
    *(
        Step(
            f"mixture-cost-{length}",
            (
                *("benchmarks/mixture_cost.py", "--seq-length", str(length)),
                *("--work", "{folder}/mixture"),
            ),
            seconds,
        )
        for length, seconds in ((512, 330), (1024, 570))
    ),
)
"""All steps together take at most 55 minutes on one GPU, and each step takes at most 10 minutes."""


def main() -> int:
    """Run the unfinished steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, help="time limit; no step starts that could exceed it"
    )
    parser.add_argument("--retry", action="store_true", help="run failed steps again")
    arguments = parser.parse_args()
    longest = max(step.seconds for step in STEPS)
    seconds = float("inf") if arguments.seconds is None else arguments.seconds
    if seconds < longest:
        parser.error(f"--seconds must be >= {longest}, the limit of the longest step")
    count = "import torch; print(torch.cuda.is_available() * torch.cuda.device_count())"
    counted = subprocess.run([sys.executable, "-c", count], stdout=subprocess.PIPE, text=True)
    gpus = 0 if counted.returncode else int(counted.stdout)
    if not gpus:
        print("error: torch sees no CUDA device here; see tools/doctor.py", file=sys.stderr)
        return 2
    steps = [step for step in STEPS if step.gpus <= gpus]
    return measure(steps, ROOT, retry=arguments.retry, seconds=seconds)


def measure(steps: Sequence[Step], root: Path, *, retry: bool, seconds: float) -> int:
    """Run the unfinished steps of ``steps``.

    The status of a step is "ok", "failed", "timed out", "unfinished" or, without a file, "not run".

    Args:
        steps: in the order in which they run.
        root: the checkout that is measured; commands run there.
        retry: whether steps that failed or timed out run again.
        seconds: time limit of this call.

    Returns:
        The exit status: 75 while steps are left, then 1 if one failed, else 0.
    """
    folder = root / "runs/measure-gpu" / code_version(root)
    folder.mkdir(parents=True, exist_ok=True)
    finished = ("ok",) if retry else ("ok", "failed", "timed out")
    table: list[dict[str, Any]] = []
    for step in steps:
        path, log = folder / f"{step.name}.json", folder / f"{step.name}.log"
        row: dict[str, Any] = {"status": "not run", "seconds": 0.0, "detail": ""}
        if path.exists():
            row = json.loads(path.read_text())
        if row["status"] not in finished and step.seconds <= seconds:
            print(f"{step.name}: at most {step.seconds} s; log in {folder}", flush=True)
            begin = time.monotonic()
            command = [sys.executable, *(word.format(folder=folder) for word in step.arguments)]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            with log.open("wb") as output:
                code = run_within(command, step.seconds, output, cwd=root, environment=environment)
            names = {None: "timed out", 0: "ok", STOPPED_STATUS: "unfinished"}
            row = {"status": names.get(code, "failed"), "seconds": time.monotonic() - begin}
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            row["detail"] = lines[-1] if row["status"] == "failed" and lines else ""
            seconds -= row["seconds"]
            write_json(path, row)
        table.append(row)
    width = max(len(step.name) for step in steps)
    for step, row in zip(steps, table, strict=True):
        line = f"{step.name:{width}}  {row['status']:10}  {row['seconds']:6.0f} s  {row['detail']}"
        print(line.rstrip())
    found = {row["status"] for row in table}
    return STOPPED_STATUS if found & {"not run", "unfinished"} else int(found != {"ok"})


def code_version(root: Path) -> str:
    """Digest of the source files, computed without git, which container images may lack."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        digest.update(repr((str(path.relative_to(root)), path.read_bytes())).encode())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
