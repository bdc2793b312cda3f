"""Every tool that reads a damaged corpus fails with a one-line error and exit status 2."""

from __future__ import annotations

import re
import runpy
import shutil
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.training.trainer import pretrain
from tests.small_corpus import VOCAB_SIZE, without_checksums, word_tokenizer, write_small_corpus

ROOT = Path(__file__).resolve().parents[3]
TRAIN = (
    "pretrain_gpt.py --model nano --seq-length 32 --train-iters 6 --global-batch-size 8 "
    "--micro-batch-size 4 --lr-warmup-iters 2 --run-dir OUTPUT "
)
TOOLS = {
    "pretrain": TRAIN + "--corpus CORPUS --mixture uniform",
    "pretrain from a data path": TRAIN + "--data-path CORPUS/train/code --split 1 "
    "--tokenizer-model CORPUS/tokenizer.json --eval-interval 0",
    "compute a mixture": "compute_mixture.py --method chameleon --corpus CORPUS "
    "--checkpoint PROXY --output OUTPUT",
    "evaluate": "evaluate.py perplexity --corpus CORPUS --checkpoint PROXY --output OUTPUT",
    "discover": "discover_domains.py --corpus CORPUS --checkpoint PROXY --discover 2 "
    "--output OUTPUT",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    tokenizer = word_tokenizer(root / "tokenizer.json")
    return write_small_corpus(root, tokenizer_hash=sha256_of_files(tokenizer))


@pytest.fixture(scope="module")
def proxy(whole, pretrain_options, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("proxy") / "run"
    pretrain(pretrain_options(run_dir, corpus=whole.root))
    return run_dir


@pytest.fixture
def run(whole, proxy, tmp_path, monkeypatch, capsys):
    """``run(tool)``: run a tool on a copy of the corpus; return its exit status and stderr."""
    shutil.copytree(whole.root, tmp_path / "corpus")
    places = {"CORPUS": tmp_path / "corpus", "PROXY": proxy, "OUTPUT": tmp_path / "output.json"}
    # The tool replaces warnings.showwarning; this line restores the function after the test.
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    on_sigterm = signal.getsignal(signal.SIGTERM)

    def start(tool):
        line = TOOLS[tool]
        for name, path in places.items():
            line = line.replace(name, str(path))
        name, *arguments = line.split()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(ROOT / "tools" / name), run_name="__main__")
        return left.value.code, capsys.readouterr().err

    yield start
    signal.signal(signal.SIGTERM, on_sigterm)


def flip_a_bit(corpus):
    """Replace the first token of every file by another token of the vocabulary."""
    for path in corpus.root.rglob("*.bin"):
        tokens = np.fromfile(path, np.uint16)
        tokens[0] ^= 1
        tokens.tofile(path)


def write_unknown_token(corpus):
    """Remove the checksums, and put a token outside the vocabulary into every file."""
    without_checksums(corpus)
    for path in corpus.root.rglob("*.bin"):
        tokens = np.fromfile(path, np.uint16)
        tokens[tokens.size // 2] = VOCAB_SIZE
        tokens.tofile(path)


def change_tokenizer(corpus):
    path = corpus.root / "tokenizer.json"
    path.write_bytes(
        path.read_bytes().replace(b'"1": 1,', b'"1": 2,').replace(b'"2": 2,', b'"2": 1,')
    )
    assert sha256_of_files(path) != corpus.tokenizer.sha256


DAMAGE = {
    "flipped bit": (flip_a_bit, r"\.bin: bytes 0 to \d+ \(block 0\)"),
    "unknown token": (write_unknown_token, rf"\.bin holds token {VOCAB_SIZE}"),
    "other tokenizer": (change_tokenizer, r"tokenizer\.json"),
}
# The same code compares checksums and token ids, so one of them suffices for each tool. A data path
# from another program has neither checksums nor the hash of its tokenizer.
CASES = [
    *((tool, "flipped bit") for tool in ("pretrain", "compute a mixture", "discover")),
    *((tool, "unknown token") for tool in ("pretrain from a data path", "evaluate")),
    *((tool, "other tokenizer") for tool in TOOLS if tool != "pretrain from a data path"),
]


@pytest.mark.parametrize(("tool", "damage"), CASES)
def test_damage_is_one_line_and_status_2(run, tool, damage, tmp_path):
    do_damage, names = DAMAGE[damage]
    do_damage(Corpus.load(tmp_path / "corpus"))
    status, stderr = run(tool)
    assert status == 2
    (error,) = (line for line in stderr.splitlines() if line.startswith("error: "))
    assert re.search(names, error)
    assert "Traceback" not in stderr
    assert not (tmp_path / "output.json").is_file()
