"""Preprocessing in several processes, as a command, killed at any point, and on a cluster."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.corpus.preprocess import work_in_processes
from megatron_chameleon.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


# Worker processes


@dataclasses.dataclass(frozen=True)
class Writing:
    """Write a file for each number, with the id of the process."""

    folder: Path
    ends_at: int | None = None
    how: str = ""

    def __call__(self, on_bytes: Callable[[int], object]) -> Callable[[int], object]:
        def write(number: int) -> None:
            if number == self.ends_at:
                self._end()
            on_bytes(number)
            (self.folder / f"{number}").write_text(f"{os.getpid()}")

        return write

    def _end(self) -> None:
        if self.how == "mistake":
            raise UserError("a mistake of the user")
        if self.how == "defect":
            raise KeyError("a defect")
        if self.how == "exit":
            os._exit(3)
        if self.how == "sleep":
            (self.folder / "asleep").touch()
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, self.how))


@pytest.fixture
def no_new_children():
    """Check that no child process is left; multiprocessing's own helper may stay."""
    before = set(psutil.Process().children())
    yield
    children = set(psutil.Process().children()) - before
    assert all("resource_tracker" in " ".join(child.cmdline()) for child in children)


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_all_numbers_are_processed_once(tmp_path, no_new_children):
    num_bytes: list[int] = []
    work_in_processes(Writing(tmp_path), list(range(40)), 2, num_bytes.append)
    workers = {int((tmp_path / f"{number}").read_text()) for number in range(40)}
    assert len(workers) <= 2  # one may do all before the other has started
    assert os.getpid() not in workers
    assert sum(num_bytes) == sum(range(40))


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("mistake", UserError, r"^a mistake of the user$"),
        ("defect", RuntimeError, r"in _end(.|\n)*KeyError: 'a defect'"),
        ("SIGKILL", UserError, "SIGKILL.*--workers"),
        ("SIGTERM", KeyboardInterrupt, None),
        ("exit", RuntimeError, "status 3"),
    ],
)
def test_the_end_of_a_worker_is_reported_and_ends_the_others(
    tmp_path, no_new_children, how, kind, message
):
    with pytest.raises(kind, match=message):
        work_in_processes(Writing(tmp_path, 5, how), list(range(1000)), 2, lambda _: None)
    assert not (tmp_path / "5").exists()
    assert len(list(tmp_path.iterdir())) < 999


@pytest.mark.parametrize(
    ("how", "status", "early"), [(signal.SIGKILL, -9, False), (signal.SIGINT, -2, True)]
)
def test_no_worker_outlives_the_process_that_started_it(tmp_path, how, status, early):
    code = (
        "import sys, pathlib\n"
        "from megatron_chameleon.corpus.preprocess import work_in_processes\n"
        "from tests.unit.corpus.test_preprocess_processes import Writing\n"
        "if __name__ == '__main__':\n"
        "    work = Writing(pathlib.Path(sys.argv[2]), 0, 'sleep')\n"
        "    work_in_processes(work, [0, 1], 2, lambda _: None)\n"
    )
    script, folder = tmp_path / "script.py", tmp_path / "done"
    script.write_text(code)
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, script, "--", folder],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        if early:  # while they are being started
            wait_until(lambda: len(psutil.Process(process.pid).children()) >= 3)
            time.sleep(0.15)
        else:
            wait_until(lambda: {path.name for path in folder.iterdir()} == {"asleep", "1"})
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        # A terminal sends SIGINT to the whole group.
        os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status
        wait_until(lambda: not any(worker.is_running() for worker in workers))
        assert errors.count(b"KeyboardInterrupt") == (1 if how == signal.SIGINT else 0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


# The command


@pytest.fixture
def command(tmp_path, tokenizer_json):
    def arguments(*more):
        fixed = ["--tokenizer-model", str(tokenizer_json), "--output", str(tmp_path / "corpus")]
        fixed += ["--split", "60,20,20", "--encoder", "own"]
        return [sys.executable, "tools/preprocess_data.py", *fixed, *map(str, more)]

    return arguments


def run(arguments):
    return subprocess.run(arguments, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)


def test_the_command_makes_a_corpus_without_importing_torch(command, jsonl, texts, tmp_path):
    inputs = [f"{name}={jsonl(f'{name}.jsonl', texts(300, i))}" for i, name in enumerate("ab")]
    arguments = command("--input", inputs[0], "--input", inputs[1])[1:]
    code = (
        f"import runpy, sys; sys.argv = {arguments}\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: print({'torch', 'megatron.core'} & set(sys.modules))"
    )
    done = run([sys.executable, "-c", code])
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
    assert Corpus.load(tmp_path / "corpus").names == ["a", "b"]
    errors = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip()]
    assert {line.split(":")[0] for line in errors} == {"tokenizing", "joining"}  # progress alone

    done = run(command("--overwrite", "--input", f"a={jsonl('a.jsonl', [b'{'] * 3)}"))
    assert done.returncode == 2
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_leaves_finished_shards_to_resume_from(
    command, jsonl, texts, tmp_path, how
):
    total = -(-jsonl("a.jsonl", texts(1500)).stat().st_size // 2000)
    arguments = command("--input", f"a={tmp_path}/a.jsonl", "--shard-bytes", 2000, "--workers", 2)
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, start_new_session=True
    )
    shards = tmp_path / "corpus" / ".partial" / "shards"
    wait_until(lambda: process.poll() is not None or len(list(shards.glob("*"))) >= 3)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    assert b"Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    finished = len(list(shards.iterdir()))
    if how == signal.SIGINT:
        assert f"{finished} of {total} shards are finished and kept" in errors.decode()
        assert not (tmp_path / "corpus" / ".partial" / "staging").exists()

    done = run(arguments)
    assert done.returncode == 0, done.stderr
    assert f"{finished} of {total} shards were finished before" in done.stdout
    names = {path.name for path in (tmp_path / "corpus").iterdir()}
    assert names == {"corpus.json", "sources.json", "tokenizer.json", "tokens"}
    Corpus.load(tmp_path / "corpus").verify()


def test_concurrent_machines_make_the_same_corpus(command, jsonl, texts, tmp_path):
    arguments = command("--input", f"a={jsonl('a.jsonl', texts(800))}", "--shard-bytes", 2000)
    quiet = subprocess.DEVNULL
    processes = [
        subprocess.Popen(
            [*arguments, "--shard", shard], cwd=ROOT, env=ENVIRONMENT, stdout=quiet, stderr=quiet
        )
        for shard in ("1/2", "2/2", "1/2")
    ]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert run(arguments).returncode == 0
    shared = Corpus.load(tmp_path / "corpus")
    shared.verify()
    (tmp_path / "corpus").rename(tmp_path / "shared")
    assert run(arguments).returncode == 0
    assert Corpus.load(tmp_path / "corpus").hash == shared.hash


@pytest.mark.parametrize("shard_bytes", [4000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_point_is_resumed(tmp_path, jsonl, texts, tokenizer_json, shard_bytes):
    some = texts(240, 1)
    records = [{"text": text, "set": "ab"[i % 2]} for i, text in enumerate(some + some[:40])]
    jsonl("0.jsonl", records[:150])
    jsonl("1.jsonl", records[150:])
    shutil.copy(tokenizer_json, tmp_path)
    script = Path(__file__).with_name("killed_runs.py")
    done = run([sys.executable, str(script), str(tmp_path), str(shard_bytes)])
    assert done.returncode == 0, done.stderr
    changes, kills, resumed, cleaned = map(int, done.stdout.split())
    assert changes > 100
    assert kills > 20
    assert cleaned > 3
    assert resumed > (10 if shard_bytes == 4000 else 3)


# On a cluster

LAUNCHER = ROOT / "examples" / "slurm" / "preprocess.sbatch"
# What sbatch does, on this machine: the tasks of an array, one after the other.
SBATCH = """#!/usr/bin/env bash
set -euo pipefail
printf '%s\\n' "$*" >> "$CALLS"
export SLURM_JOB_ID=7 SLURM_CPUS_PER_TASK=16
while [[ $1 == --* ]]; do
  [[ $1 == --array=1-* ]] && export SLURM_ARRAY_TASK_COUNT=${1#--array=1-}
  shift
done
for task in $(seq "${SLURM_ARRAY_TASK_COUNT:-1}"); do
  [[ -n ${SLURM_ARRAY_TASK_COUNT:-} ]] && export SLURM_ARRAY_TASK_ID=$task
  bash "$@" >> "$PRINTED" 2>&1
done
echo '7;cluster'
"""
SRUN = '#!/usr/bin/env bash\necho "cores: $SRUN_CPUS_PER_TASK"\nexec "$@"\n'


def test_an_array_makes_the_shards_and_a_job_joins_them(tmp_path, jsonl, texts, tokenizer_json):
    programs = tmp_path / "bin"
    programs.mkdir()
    python = f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n'
    for name, content in (("sbatch", SBATCH), ("srun", SRUN), ("python", python)):
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)
    environment = {
        **{name: value for name, value in ENVIRONMENT.items() if not name.startswith("SLURM")},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "PRINTED": str(tmp_path / "printed"),
    }
    options = ["--input", f"a={jsonl('a.jsonl', texts(300))}", "--output", f"{tmp_path}/corpus"]
    options += ["--tokenizer-model", f"{tokenizer_json}", "--split", "60,20,20"]
    launch = ["bash", str(LAUNCHER), "2", *options, "--shard-bytes", "4000"]
    done = subprocess.run(launch, env=environment, capture_output=True, text=True)
    printed = (tmp_path / "printed").read_text()
    assert done.returncode == 0, done.stderr + printed
    array, join = (tmp_path / "calls").read_text().splitlines()
    assert array.startswith(f"--parsable --array=1-2 {LAUNCHER} --input a=")
    assert join.startswith("--parsable --dependency=afterok:7 --kill-on-invalid-dep=yes ")
    assert printed.count("cores: 16\n") == 3
    assert Corpus.load(tmp_path / "corpus").names == ["a"]
