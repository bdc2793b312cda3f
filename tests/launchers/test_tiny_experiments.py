"""Run the paper's experiments of examples/compare_methods.sh with SIZE=tiny, in the paper's order.

tests/unit/experiments/test_compare.py checks the commands of all columns at full size.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_chameleon.artifacts import Mixture, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe
from tests.distributed.launch import REPOSITORY, finish, start
from tests.fixtures.task_data import Words, write_task_data
from tests.text_checkpoint import EOD_TOKEN

SECONDS = 900.0  # limit for one experiment on a loaded machine
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * SECONDS)]
TASKS = {"arc_easy", "sciq", "winogrande"}
# Experiment -> two columns of its table, and the baseline; the tests of later experiments use the
# results of earlier ones.
EXPERIMENTS = {
    "slimpajama": ("uniform", "chameleon-pretrain"),
    "slimpajama-1.2b": ("uniform", "chameleon-pretrain"),
    "pile": ("printed-human", "chameleon-pretrain"),
    "wiki40b": ("uniform", "chameleon-finetune"),
    "stack": ("uniform", "chameleon-pretrain"),
}


def bash(folder: Path, *command: str, **choices: str) -> str:
    """Run a command in ``folder`` with these variables; return its output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = [f"{key}={value}" for key, value in {"PATH": path, **choices}.items()]
    log = folder / "log.txt"
    log.unlink(missing_ok=True)
    status = finish(start(["env", *variables, *command], log, folder), SECONDS)
    printed = log.read_text(errors="replace")
    assert status == 0, printed
    return printed


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with copies of the tasks' data sets, and the corpus of smoke tests."""
    root = tmp_path_factory.mktemp("experiments")
    write_task_data(root / "tasks", 4)
    inputs = []
    for name in ("news", "code", "poems"):
        texts = [Words(f"{name} {number}").text(8) for number in range(200)]
        path = root / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{name}: {text}"}) + "\n" for text in texts))
        inputs.append(f"{name}={path}")
    tokenizer = root / "tokenizer.json"
    tokenizer.write_bytes(byte_level_bpe(iter([Words("tokenizer").text(2000)]), 601, EOD_TOKEN))
    command = [sys.executable, "-m", "megatron_chameleon", "preprocess_data", "--input", *inputs]
    command += ["--tokenizer-model", str(tokenizer), "--output", "runs/quickstart/1-corpus"]
    bash(root, *command)
    return root


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_compares_its_columns(root, name):
    columns = EXPERIMENTS[name]
    choices = {"EXPERIMENT": name, "SIZE": "tiny", "METHODS": " ".join(columns)}
    if name == "pile":
        choices["DATA_DIR"] = "tasks"  # otherwise, smoke tests evaluate no tasks
    printed = bash(root, "bash", str(REPOSITORY / "examples/compare_methods.sh"), **choices)
    folder = root / "runs/tiny" / name
    table: dict[str, Any] = json.loads((folder / "7-report/compare_methods.json").read_text())
    assert (list(table["mixtures"]), table["baseline"]) == (list(columns), columns[0])
    assert (folder / "7-report/report.html").is_file()
    runs = [TrainingRun.load(path) for path in sorted((folder / "5-base").iterdir())]
    assert {(run.status, run.step) for run in runs} == {("finished", 12)}
    assert len(runs) == 6
    figures = table["mixtures"][columns[1]]
    mixture = Mixture.load(folder / f"4-mixture/{columns[1]}.json")
    assert figures["weights"] == pytest.approx(dict(mixture.weights))
    assert figures["flops"] > 0
    proxy = TrainingRun.load(root / "runs/tiny/slimpajama/2-proxy/tiny-seed1")
    # Where the embedding model existed before, only its forward passes are a cost.
    assert (figures["flops"] > proxy.cost.flops) == name.startswith("slimpajama")
    tasks = {
        seed: set(found)
        for column in columns
        for seed, found in table["mixtures"][column]["downstream_accuracy"].items()
    }
    if name == "pile":
        assert tasks.keys() == {"seed 1", "seed 2", "seed 3"}
        assert all(TASKS.issubset(found) for found in tasks.values())
        assert "Downstream accuracy" in printed
    else:
        assert tasks == {}
    if name in ("wiki40b", "stack"):
        tuned = root / "runs/tiny/pile/5-base/chameleon-pretrain-seed1"
        expected = CheckpointRecord.load(find_checkpoint(tuned)).hash
        assert {run.provenance.inputs["pretrained checkpoint"] for run in runs} == {expected}
