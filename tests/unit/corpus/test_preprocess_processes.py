"""Run preprocessing as a command, in several processes, killed at any point, and on a cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_chameleon.artifacts import Corpus
from tests.unit.corpus.corpus_making import assert_same

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


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
    # Only progress bars are printed to stderr.
    assert {line.split(":")[0] for line in errors} == {"tokenizing", "joining"}


@pytest.mark.parametrize(
    ("how", "target", "status"),
    [
        (signal.SIGKILL, "parent", -signal.SIGKILL),
        (signal.SIGINT, "group", 130),
        (signal.SIGINT, "early", 130),
        (signal.SIGTERM, "one worker", 130),
        (signal.SIGKILL, "worker", 2),
    ],
)
def test_an_interrupted_run_leaves_finished_shards_to_resume_from(
    command, jsonl, texts, tmp_path, how, target, status
):
    total = -(-jsonl("a.jsonl", texts(500)).stat().st_size // 2000)
    arguments = command("--input", f"a={tmp_path}/a.jsonl", "--shard-bytes", 2000, "--workers", 2)
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, start_new_session=True
    )
    shards = tmp_path / "corpus" / ".partial" / "shards"

    def workers():
        children = psutil.Process(process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    if target == "early":  # while workers are starting
        wait_until(lambda: process.poll() is not None or len(workers()) >= 2)
    else:
        wait_until(lambda: process.poll() is not None or len(list(shards.glob("*"))) >= 3)
    children = psutil.Process(process.pid).children(recursive=True)
    if target in ("worker", "one worker"):
        workers()[0].send_signal(how)
    elif target == "parent":
        process.send_signal(how)
    else:  # a terminal or a scheduler signals all processes
        os.killpg(process.pid, how)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == status
    assert b"Traceback" not in errors
    assert (b"--workers" in errors) == (target == "worker")
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    finished = len(list(shards.glob("*")))
    if target != "parent":
        kept = f"{finished} of {total} shards are finished and kept"
        assert kept in errors.decode() or finished == 0
        assert not (tmp_path / "corpus" / ".partial" / "staging").exists()

    done = run([*arguments[:-1], "1"])  # one worker starts faster
    assert done.returncode == 0, done.stderr
    assert f"{finished} of {total} shards were finished before" in done.stdout or finished == 0
    names = {path.name for path in (tmp_path / "corpus").iterdir()}
    assert names == {"corpus.json", "sources.json", "tokenizer.json", "tokens"}
    Corpus.load(tmp_path / "corpus").verify()


def test_concurrent_machines_make_the_same_corpus(command, jsonl, texts, tmp_path):
    arguments = command("--input", f"a={jsonl('a.jsonl', texts(800))}", "--shard-bytes", 2000)
    alone = [*arguments, "--workers", "1"]
    quiet = subprocess.DEVNULL
    processes = [
        subprocess.Popen(
            [*alone, "--shard", shard], cwd=ROOT, env=ENVIRONMENT, stdout=quiet, stderr=quiet
        )
        for shard in ("1/2", "2/2", "1/2")
    ]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert run(alone).returncode == 0
    shared = Corpus.load(tmp_path / "corpus")
    shared.verify()
    (tmp_path / "corpus").rename(tmp_path / "shared")
    assert run([*arguments, "--workers", "2"]).returncode == 0
    assert Corpus.load(tmp_path / "corpus").hash == shared.hash


@pytest.mark.slow
def test_a_worker_killed_on_ray_repeats_its_shard(command, jsonl, texts, tmp_path, monkeypatch):
    some = texts(4000)
    for name in "ab":
        jsonl(f"{name}.jsonl", [f"{name} {number} {text}" for number, text in enumerate(some * 10)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    inputs = ("--input", "a=a.jsonl", "--input", "b=b.jsonl")  # relative paths
    python, tool, *arguments = command(*inputs, "--shard-bytes", 1_000_000)
    arguments = [python, str(ROOT / tool), *arguments]
    process = subprocess.Popen([*arguments, "--ray"], stderr=subprocess.PIPE)
    partial = tmp_path / "corpus" / ".partial"

    def busy():
        """The workers that are writing a shard, after two shards were finished."""
        assert process.poll() is None
        if len([*partial.glob("shards/*")]) < 2:
            return []
        workers = psutil.Process(process.pid).children(recursive=True)
        return [
            worker
            for worker in workers
            if "ray::_call" in " ".join(worker.cmdline())
            and any("/staging/" in file.path for file in worker.open_files())
        ]

    def repeated():
        """The finished shards of which a killed worker left a part."""
        assert process.poll() is None
        shards = {path.name for path in partial.glob("shards/*")}  # before any is moved there
        return shards & {path.name.partition("-")[0] for path in partial.glob("staging/*/*-*")}

    wait_until(busy, seconds=300)[0].kill()
    assert len(wait_until(repeated, seconds=300)) == 1
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (tmp_path / "corpus").rename(tmp_path / "on-ray")
    assert subprocess.run([*arguments, "--workers", "1"]).returncode == 0
    assert_same(Corpus.load(tmp_path / "corpus"), Corpus.load(tmp_path / "on-ray"))


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
    changes, kills, resumed, cleaned = map(int, done.stdout.splitlines()[-1].split())
    assert changes > 100
    assert kills > 20
    assert cleaned > 3
    assert resumed > (10 if shard_bytes == 4000 else 3)


# On a cluster

LAUNCHER = ROOT / "examples" / "slurm" / "preprocess.sbatch"
# The stand-ins for sbatch and srun record their arguments.
SBATCH = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
echo '7;cluster'
"""
SRUN = """#!/usr/bin/env bash
echo "$SRUN_CPUS_PER_TASK $*" >> "$CALLS"
"""


def test_an_array_makes_the_shards_and_a_job_joins_them(tmp_path):
    for name, content in (("sbatch", SBATCH), ("srun", SRUN)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    outside |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)}
    inside = {**outside, "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "16"}
    task = {**inside, "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "3"}
    launch = ["bash", str(LAUNCHER)]
    subprocess.run([*launch, "3", "--input", "a"], env=outside, check=True)
    for environment in (task, inside):
        subprocess.run([*launch, "--input", "a"], env=environment, check=True)
    assert calls.read_text().splitlines() == [
        f"--parsable --array=1-3 {LAUNCHER} --input a",
        "--parsable --output=%x-%j.log --dependency=afterok:7 --kill-on-invalid-dep=yes "
        f"{LAUNCHER} --input a",
        "16 python -m megatron_chameleon preprocess_data --input a --shard 2/3",
        "16 python -m megatron_chameleon preprocess_data --input a",
    ]
