from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_chameleon.artifacts import Corpus

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def command(tmp_path, tokenizer_json):
    def arguments(*more):
        fixed = ["--tokenizer-model", str(tokenizer_json), "--output", str(tmp_path / "corpus")]
        return [sys.executable, "tools/preprocess_data.py", *fixed, *map(str, more)]

    return arguments


def run(arguments):
    return subprocess.run(arguments, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)


def test_the_command_makes_a_corpus_and_warns_of_nothing(command, jsonl, texts, tmp_path):
    inputs = [f"{name}={jsonl(f'{name}.jsonl', texts(300, i))}" for i, name in enumerate("ab")]
    done = run(command("--input", inputs[0], "--input", inputs[1], "--split", "60,20,20"))
    assert done.returncode == 0, done.stderr
    assert Corpus.load(tmp_path / "corpus").names == ["a", "b"]
    assert "next: torchrun" in done.stdout
    told = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip()]
    assert told
    assert {line.split(":")[0] for line in told} == {"tokenizing", "joining"}


def test_a_mistake_is_one_line_with_status_2(command, jsonl, tmp_path):
    done = run(command("--input", f"a={jsonl('a.jsonl', [b'{'] * 3)}"))
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "3 of 3 lines are malformed" in errors[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["--input"]])
def test_nothing_waits_for_torch(command, jsonl, texts, arguments):
    if arguments == ["--input"]:
        _, *arguments = command("--input", f"a={jsonl('a.jsonl', texts(300))}")
    else:
        arguments = ["tools/preprocess_data.py", *arguments]
    code = (
        f"import runpy, sys; sys.argv = {arguments}\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: print({'torch', 'megatron.core'} & set(sys.modules))"
    )
    done = run([sys.executable, "-c", code])
    assert "--tokenizer-model" in done.stdout or "wrote" in done.stdout
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_that_are_interrupted_leave_finished_shards_to_go_on_with(
    command, jsonl, texts, tmp_path, how
):
    total = -(-jsonl("a.jsonl", texts(4000)).stat().st_size // 2000)
    options = ["--split", "60,20,20", "--shard-bytes", 2000, "--workers", 2, "--encoder", "own"]
    arguments = command("--input", f"a={tmp_path}/a.jsonl", *options)
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, start_new_session=True
    )
    shards = tmp_path / "corpus" / ".partial" / "shards"
    while not shards.is_dir() or len(list(shards.iterdir())) < 3:
        assert process.poll() is None
        time.sleep(0.002)
    workers = psutil.Process(process.pid).children(recursive=True)
    # SIGINT as a terminal gives it, to all of them.
    os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
    _, told = process.communicate(timeout=120)
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    assert b"Traceback" not in told
    _, alive = psutil.wait_procs(workers, timeout=60)  # one may be starting still
    assert not alive
    finished = len(list(shards.iterdir()))
    if how != signal.SIGKILL:
        assert f"{finished} of {total} shards are finished and kept" in told.decode()
        assert not (tmp_path / "corpus" / ".partial" / "staging").exists()

    done = run(arguments)
    assert done.returncode == 0, done.stderr
    assert f"{finished} of {total} shards were finished before" in done.stdout
    assert sorted(path.name for path in (tmp_path / "corpus").iterdir()) == [
        "corpus.json",
        "sources.json",
        "tokenizer.json",
        "tokens",
    ]
    Corpus.load(tmp_path / "corpus").verify()


def test_shares_made_at_once_and_one_of_them_twice_are_no_harm(command, jsonl, texts, tmp_path):
    options = ["--shard-bytes", 2000, "--split", "60,20,20", "--encoder", "own"]
    arguments = command("--input", f"a={jsonl('a.jsonl', texts(2000))}", *options)
    quiet = subprocess.DEVNULL
    processes = [
        subprocess.Popen(
            [*arguments, "--shard", share], cwd=ROOT, env=ENVIRONMENT, stdout=quiet, stderr=quiet
        )
        for share in ("1/2", "2/2", "1/2")
    ]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    done = run(arguments)
    assert done.returncode == 0, done.stderr
    shared = Corpus.load(tmp_path / "corpus")
    shared.verify()
    (tmp_path / "corpus").rename(tmp_path / "shared")
    assert run(arguments).returncode == 0
    assert Corpus.load(tmp_path / "corpus").hash == shared.hash


def test_a_share_of_the_work_says_what_to_run_next(command, jsonl, texts, tmp_path):
    arguments = command("--input", f"a={jsonl('a.jsonl', texts(300))}", "--shard-bytes", 9000)
    done = run([*arguments, "--shard", "1/2"])
    assert done.returncode == 0, done.stderr
    assert "next: the same command with --shard 2/2, and without --shard in the end" in done.stdout
    assert not (tmp_path / "corpus" / "corpus.json").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_leaves_no_corpus_and_a_second_one_works(
    command, jsonl, texts, tmp_path, how
):
    whole = jsonl("whole.jsonl", texts(300))
    # Large enough that the run is interrupted in the middle of it.
    large = jsonl("large.jsonl", texts(300))
    large.write_bytes(large.read_bytes() * 2000)
    arguments = command("--input", f"a={whole}", f"b={large}", "--split", "60,20,20")
    process = subprocess.Popen(arguments, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE)
    directories = tmp_path / "corpus" / ".partial" / "staging"
    while not list(directories.glob("*/000000/documents.bin")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(how)
    _, told = process.communicate(timeout=120)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert b"Traceback" not in told
    assert not (tmp_path / "corpus" / "corpus.json").exists()
    assert (tmp_path / "corpus").exists() == (how == signal.SIGKILL)

    jsonl("large.jsonl", texts(300, 1))
    done = run(arguments)
    assert done.returncode == 0, done.stderr
    assert Corpus.load(tmp_path / "corpus").names == ["a", "b"]
    assert not (tmp_path / "corpus" / ".partial").exists()
