from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
    assert all(line.startswith("tokenizing") for line in told)


def test_a_mistake_is_one_line_with_status_2(command, jsonl, tmp_path):
    done = run(command("--input", f"a={jsonl('a.jsonl', [b'{'] * 3)}"))
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "3 of 3 lines are malformed" in errors[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "corpus").exists()


def test_help_does_not_wait_for_torch(command):
    code = (
        "import runpy, sys; sys.argv = ['tools/preprocess_data.py', '--help']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = run([sys.executable, "-c", code])
    assert "--tokenizer-model" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_leaves_no_corpus_and_a_second_one_works(
    command, jsonl, texts, tmp_path, how
):
    whole = jsonl("whole.jsonl", texts(300))
    # A pipe that never ends holds the run in the middle of its input.
    endless = tmp_path / "endless.jsonl"
    os.mkfifo(endless)
    arguments = command("--input", f"a={whole}", f"b={endless}", "--split", "60,20,20")
    process = subprocess.Popen(arguments, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE)
    with endless.open("wb"):  # opens once the run has come to it
        assert (tmp_path / "corpus" / ".partial" / "tokens" / "a-train.bin").exists()
        time.sleep(0.2)
        process.send_signal(how)
        _, told = process.communicate(timeout=120)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert b"Traceback" not in told
    assert not (tmp_path / "corpus" / "corpus.json").exists()
    assert (tmp_path / "corpus").exists() == (how == signal.SIGKILL)

    endless.unlink()
    jsonl("endless.jsonl", texts(300, 1))
    done = run(arguments)
    assert done.returncode == 0, done.stderr
    assert Corpus.load(tmp_path / "corpus").names == ["a", "b"]
    assert not (tmp_path / "corpus" / ".partial").exists()
