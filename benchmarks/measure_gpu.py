"""Run the GPU tests and all benchmarks that measure a CUDA device, within 45 minutes.

    python benchmarks/measure_gpu.py [--seconds 570] [--retry] [--no-commit]

A step that fails or exceeds its time limit does not keep the others from running. The results
files of a step that succeeds are committed at once. Finished steps are skipped by the next call
for the same code; --retry runs failed ones again. Logs and statuses are in runs/measure-gpu.
Exit status: 0 if every step succeeded, 1 if one failed, 75 if --seconds left some for another call.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RESULTS = "benchmarks/results"
SECONDS_TO_STOP = 10


@dataclasses.dataclass(frozen=True)
class Step:
    """A command, by arguments to this Python, and the seconds it may take."""

    name: str
    arguments: tuple[str, ...]
    seconds: int


STEPS = (
    Step("doctor", ("tools/doctor.py",), 40),
    Step("test-kernels", ("benchmarks/gpu_tests.py", "kernels"), 150),
    Step("test-runs", ("benchmarks/gpu_tests.py", "runs"), 360),
    Step("test-methods", ("benchmarks/gpu_tests.py", "methods"), 240),
    Step("pooling", ("benchmarks/pooling.py",), 60),
    Step(
        "embedding",
        ("benchmarks/embedding.py", "--windows", "2048", "--window-length", "1024"),
        150,
    ),
    Step("doge", ("benchmarks/doge.py",), 120),
    Step("swarm", ("benchmarks/swarm.py", "--seconds", "120"), 180),
    Step("train", ("benchmarks/train.py", "--seconds", "400"), 480),
    Step("mixture-cost-512", ("benchmarks/mixture_cost.py", "--seq-length", "512"), 330),
    Step("mixture-cost-1024", ("benchmarks/mixture_cost.py", "--seq-length", "1024"), 570),
)
"""At most 45 minutes in all, and each within 10."""


@dataclasses.dataclass(frozen=True)
class StepStatus:
    """How a step ended: ``ok``, ``failed`` or ``timed out``; ``detail`` says what with."""

    status: str
    seconds: float
    detail: str = ""


def main() -> int:
    """Run what is left to run; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="start no step that could end later")
    parser.add_argument("--retry", action="store_true", help="run failed steps again")
    parser.add_argument("--no-commit", action="store_true", help="leave results uncommitted")
    arguments = parser.parse_args()
    check = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", check], check=False).returncode:
        print("error: torch sees no CUDA device here; see tools/doctor.py", file=sys.stderr)
        return 2
    return measure(
        STEPS,
        ROOT,
        commit=not arguments.no_commit,
        retry=arguments.retry,
        seconds=float("inf") if arguments.seconds is None else arguments.seconds,
    )


def measure(steps: Sequence[Step], root: Path, *, commit: bool, retry: bool, seconds: float) -> int:
    """Run the steps of ``steps`` that have no status yet, one after the other.

    Args:
        steps: in the order in which they run.
        root: the git repository whose results are measured; commands run there.
        commit: commit the results files of each step that succeeds.
        retry: run failed steps again.
        seconds: for all steps of this call.

    Returns:
        The exit status: 0 if all succeeded, 1 if one failed, 75 if some are left.
    """
    from megatron_chameleon.artifacts.files import write_json
    from megatron_chameleon.errors import STOPPED_STATUS

    folder = root / "runs/measure-gpu" / code_version(root)
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    statuses: dict[str, StepStatus] = {}
    for step in steps:
        path = folder / f"{step.name}.json"
        known = StepStatus(**json.loads(path.read_text())) if path.exists() else None
        if known is not None and (known.status == "ok" or not retry):
            statuses[step.name] = known
        elif time.monotonic() + step.seconds <= deadline:
            print(f"{step.name}: at most {step.seconds} s; log in {folder}", flush=True)
            statuses[step.name] = run_step(step, root, folder / f"{step.name}.log", commit=commit)
            write_json(path, dataclasses.asdict(statuses[step.name]))
    print_table(steps, statuses)
    if any(status.status != "ok" for status in statuses.values()):
        return 1
    return STOPPED_STATUS if len(statuses) < len(steps) else 0


def run_step(step: Step, root: Path, log: Path, *, commit: bool) -> StepStatus:
    """Run one step and commit the results files that it wrote, if it succeeded."""
    before = digests(root / RESULTS)
    start = time.monotonic()
    status, detail = run_limited([sys.executable, *step.arguments], step.seconds, root, log)
    seconds = round(time.monotonic() - start, 1)
    after = digests(root / RESULTS)
    changed = sorted(str(path) for path in after if after[path] != before.get(path))
    if status == "ok" and changed:
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
    """Run ``command`` with its output in ``log``; stop it and its children after ``seconds``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "timed out", f"after {seconds} s"
        finally:
            stop_group(process)
    if code == 0:
        return "ok", ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "failed", f"status {code}: {lines[-1] if lines else 'no output'}"


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """Stop a process that leads a group, and whatever it has left behind there."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)


def code_version(root: Path) -> str:
    """Digest of the last commit and the uncommitted changes, results files apart."""
    rest = ("--", ".", f":!{RESULTS}")
    commit = git(root, "log", "-1", "--format=%H", *rest)
    changes = git(root, "diff", "HEAD", *rest)
    return hashlib.sha256((commit + changes).encode()).hexdigest()[:12]


def commit_files(root: Path, paths: Sequence[str], subject: str) -> str | None:
    """Commit ``paths`` and nothing else; the reason if git refuses."""
    try:
        git(root, "add", "--", *paths)
        git(root, "commit", "--quiet", "--message", subject, "--", *paths)
    except subprocess.CalledProcessError as error:
        return (error.stderr or error.stdout or str(error)).strip().splitlines()[0]
    return None


def git(root: Path, *arguments: str) -> str:
    """What a git command prints."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def digests(folder: Path) -> dict[Path, str]:
    """SHA-256 of each file of ``folder``."""
    files = folder.iterdir() if folder.is_dir() else ()
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


def print_table(steps: Sequence[Step], statuses: dict[str, StepStatus]) -> None:
    """A line for each step."""
    width = max(len(step.name) for step in steps)
    for step in steps:
        row: Any = statuses.get(step.name, StepStatus("not run", 0.0))
        print(f"{step.name:{width}}  {row.status:9}  {row.seconds:6.0f} s  {row.detail}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
