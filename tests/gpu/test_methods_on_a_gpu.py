"""Embedding, evaluation and methods that train proxies give the CPU's results on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_chameleon.artifacts import EmbeddingStore, EvaluationResult, Mixture
from megatron_chameleon.artifacts.downstream_result import DownstreamResult
from tests.fixtures.task_data import write_task_data
from tests.gpu.conftest import IS_SIMULATED, PRETRAINING_FLAGS, ROOT, TRAINING_FLAGS, Tools
from tests.rounding import assert_same_scores
from tests.text_checkpoint import write_text_checkpoint

TOLERANCE = 1e-4
# Weights depend on differences of losses and on products of gradients, which amplify rounding.
WEIGHT_TOLERANCE = 1e-3
PLACES = {"gpu": False, "cpu": True}
REGMIX = ("--num-proxies", "6", "--members-at-once", "3", "--eval-tokens", "320", "--folds", "2")
METHODS: dict[str, tuple[str, ...]] = {
    "doremi": PRETRAINING_FLAGS,
    "doge": (*PRETRAINING_FLAGS, "--doge-mu", "0.05"),
    "regmix": (*TRAINING_FLAGS, *REGMIX),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_embeddings_and_perplexity_are_those_of_the_cpu(
    tools: Tools, tmp_path: Path, ranks: int
) -> None:
    for place, on_cpu in PLACES.items():
        common = ("--corpus", tools.corpus.root, "--checkpoint", tools.reference().root, "--output")
        started = 1 if on_cpu else ranks
        output = tmp_path / place / "mixture.json"
        tools.run("compute_mixture.py", *common, output, ranks=started, on_cpu=on_cpu)
        output = tmp_path / f"{place}.json"
        tools.run("evaluate.py", "perplexity", *common, output, ranks=started, on_cpu=on_cpu)
    stores = [EmbeddingStore.load(tmp_path / place / "embeddings") for place in PLACES]
    results = [EvaluationResult.load(tmp_path / f"{place}.json") for place in PLACES]
    for name in tools.corpus.names:
        vectors, expected = (store.vectors(name) for store in stores)
        np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
        loss, expected_loss = (result.domains[name].loss for result in results)
        assert loss == pytest.approx(expected_loss, abs=TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_methods_find_the_weights_of_the_cpu(tools: Tools, tmp_path: Path, method: str) -> None:
    flags: tuple[str | Path, ...] = METHODS[method]
    if method == "doremi":
        flags = (*flags, "--reference", tools.reference().root)
    weights = []
    for place, on_cpu in PLACES.items():
        output = tmp_path / place / "mixture.json"
        places = ("--method", method, "--corpus", tools.corpus.root, "--output", output)
        tools.run("compute_mixture.py", *places, "--accept-uncertain", *flags, on_cpu=on_cpu)
        weights.append(dict(Mixture.load(output).weights))
    assert weights[0] == pytest.approx(weights[1], abs=WEIGHT_TOLERANCE)


def test_downstream_accuracies_are_those_of_the_cpu(tools: Tools, tmp_path: Path) -> None:
    model = write_text_checkpoint(tmp_path)
    write_task_data(tmp_path / "data", 4)
    for place, on_cpu in PLACES.items():
        tools.run(
            "evaluate.py",
            *("downstream", "--checkpoint", model.checkpoint, "--data-dir", tmp_path / "data"),
            *("--tasks", "copa", "race", "--shots", "0", "1", "--output"),
            tmp_path / f"{place}.json",
            on_cpu=on_cpu,
        )
    found, expected = (DownstreamResult.load(tmp_path / f"{place}.json") for place in PLACES)
    assert_same_scores(found, expected, tolerance=1e-4)


@pytest.mark.skipif(IS_SIMULATED, reason="tools/doctor.py describes the real device")
def test_the_doctor_names_the_device() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "doctor.py"), "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert torch.cuda.get_device_name(0) in json.dumps(json.loads(done.stdout))
