"""Run the GPU tests and all benchmarks that measure a CUDA device, within 45 minutes on one GPU.

    python benchmarks/measure_gpu.py [--seconds 570] [--retry] [--no-commit]

The other steps also run if one fails or exceeds its time limit. The results files of a step that
succeeds are committed at once, also if rows are left for the next call. The next call for the same
code skips finished steps; --retry reruns failed ones. Logs and statuses are in runs/measure-gpu.
Several GPUs add a step of at most 7 minutes. Exit status: 75 while steps are left for another call,
then 1 if one failed, else 0.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.process_tree import run_within
from megatron_chameleon.artifacts.files import write_json
from megatron_chameleon.errors import STOPPED_STATUS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"
SOURCES = (
    "*.py",
    "benchmarks/**/*.py",
    "megatron_chameleon/**/*.py",
    "tests/**/*.py",
    "tools/*.py",
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A Python command and its time limit in seconds."""

    name: str
    arguments: tuple[str, ...]
    """``{folder}`` in them is replaced by the log folder of this version of the code."""
    seconds: int
    gpus: int = 1
    """Minimum number of GPUs."""


STEPS = (
    Step("doctor", ("tools/doctor.py",), 40),
    Step("test-kernels", ("benchmarks/gpu_tests.py", "kernels"), 150),
    Step("test-losses", ("benchmarks/gpu_tests.py", "losses"), 230),
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
"""At most 45 minutes in all on one GPU, and each within 10."""


@dataclasses.dataclass(frozen=True)
class StepStatus:
    """The outcome of a step; the next call resumes an ``unfinished`` one.

    ``status`` is ``ok``, ``failed``, ``timed out`` or ``unfinished``.
    """

    status: str
    seconds: float
    detail: str = ""


def main() -> int:
    """Run the unfinished steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="start no step that could end later")
    parser.add_argument("--retry", action="store_true", help="run failed steps again")
    parser.add_argument("--no-commit", action="store_true", help="leave results uncommitted")
    arguments = parser.parse_args()
    longest = max(step.seconds for step in STEPS)
    if arguments.seconds is not None and arguments.seconds < longest:
        parser.error(f"--seconds must be >= {longest}, the limit of the longest step")
    count = "import torch; print(torch.cuda.is_available() * torch.cuda.device_count())"
    counted = subprocess.run([sys.executable, "-c", count], stdout=subprocess.PIPE, text=True)
    gpus = 0 if counted.returncode else int(counted.stdout)
    if not gpus:
        print("error: torch sees no CUDA device here; see tools/doctor.py", file=sys.stderr)
        return 2
    return measure(
        [step for step in STEPS if step.gpus <= gpus],
        ROOT,
        commit=not arguments.no_commit,
        retry=arguments.retry,
        seconds=float("inf") if arguments.seconds is None else arguments.seconds,
    )


def measure(steps: Sequence[Step], root: Path, *, commit: bool, retry: bool, seconds: float) -> int:
    """Run the unfinished steps of ``steps``.

    Args:
        steps: in the order in which they run.
        root: the checkout whose results are measured; commands run there.
        commit: commit the results files of each step that succeeds, if git is usable there.
        retry: count failed steps as not run yet.
        seconds: for all steps of this call.

    Returns:
        The exit status: 75 while steps are left, then 1 if one failed, else 0.
    """
    if commit and (problem := git_problem(root)):
        print(f"results are not committed: {problem}", flush=True)
        commit = False
    folder = root / "runs/measure-gpu" / code_version(root)
    folder.mkdir(parents=True, exist_ok=True)
    statuses: dict[str, StepStatus] = {}
    for step in steps:
        path = folder / f"{step.name}.json"
        if path.exists():
            statuses[step.name] = StepStatus(**json.loads(path.read_text()))
            if retry and statuses[step.name].status in ("failed", "timed out"):
                path.unlink()
                del statuses[step.name]
        is_left = step.name not in statuses or statuses[step.name].status == "unfinished"
        if is_left and step.seconds <= seconds:
            print(f"{step.name}: at most {step.seconds} s; log in {folder}", flush=True)
            begin = time.monotonic()
            statuses[step.name] = run_step(step, root, folder, commit=commit)
            seconds -= time.monotonic() - begin
            write_json(path, dataclasses.asdict(statuses[step.name]))
    table = [statuses.get(step.name, StepStatus("not run", 0.0)) for step in steps]
    width = max(len(step.name) for step in steps)
    for step, row in zip(steps, table, strict=True):
        print(f"{step.name:{width}}  {row.status:10}  {row.seconds:6.0f} s  {row.detail}".rstrip())
    found = {row.status for row in table}
    return STOPPED_STATUS if found & {"not run", "unfinished"} else int(found != {"ok"})


def run_step(step: Step, root: Path, folder: Path, *, commit: bool) -> StepStatus:
    """Run one step and commit the results files that it wrote, unless it failed."""
    before = digests(root / RESULTS)
    start = time.monotonic()
    command = [sys.executable, *(word.format(folder=folder) for word in step.arguments)]
    status, detail = run_limited(command, step.seconds, root, folder / f"{step.name}.log")
    seconds = round(time.monotonic() - start, 1)
    after = digests(root / RESULTS)
    changed = sorted(str(path) for path in after if after[path] != before.get(path))
    if status in ("ok", "unfinished") and changed:
        detail = f"{len(changed)} results file(s)"
        if commit:
            problem = commit_files(root, changed, f"benchmarks: measure {step.name} on a GPU")
            if problem is not None:
                return StepStatus("failed", seconds, f"measured, but git commit: {problem}")
            detail += ", committed"
    elif changed:
        detail += "; its results files are left uncommitted"
    return StepStatus(status, seconds, detail)


def run_limited(command: list[str], seconds: int, cwd: Path, log: Path) -> tuple[str, str]:
    """Run ``command`` with its output in ``log``; returns status and detail."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(log, "wb") as output:
        code = run_within(command, seconds, output, cwd=cwd, environment=environment)
    if code is None:
        return "timed out", f"after {seconds} s"
    if code in (0, STOPPED_STATUS):
        return ("unfinished" if code else "ok"), ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "failed", f"status {code}: {lines[-1] if lines else 'no output'}"


def code_version(root: Path) -> str:
    """Digest of the source files, computed without git, which container images may lack."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        digest.update(repr((str(path.relative_to(root)), path.read_bytes())).encode())
    return digest.hexdigest()[:12]


def git_problem(root: Path) -> str | None:
    """Why git cannot commit in ``root``; None if it can."""
    try:
        git(root, "rev-parse", "--verify", "HEAD")
    except subprocess.CalledProcessError as error:
        return str(error.stderr).partition("\n")[0]
    except OSError as error:
        return str(error)
    return None


def commit_files(root: Path, paths: Sequence[str], subject: str) -> str | None:
    """Commit only ``paths``; returns git's error, if any."""
    try:
        git(root, "add", "--", *paths)
        git(root, "commit", "--quiet", "--message", subject, "--", *paths)
    except subprocess.CalledProcessError as error:
        return (error.stderr or error.stdout or str(error)).strip().splitlines()[0]
    return None


def git(root: Path, *arguments: str) -> str:
    """The standard output of a git command."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def digests(folder: Path) -> dict[Path, str]:
    """SHA-256 of each file of ``folder``."""
    files = folder.iterdir() if folder.is_dir() else ()
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


if __name__ == "__main__":
    sys.exit(main())
