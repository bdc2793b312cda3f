"""The pipeline on one CUDA device against the same pipeline on the CPU of the same machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import Corpus, EmbeddingStore, EvaluationResult, TrainingRun
from tests.small_corpus import write_small_corpus

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
# Sums of products are added up in another order, and 12 steps carry the difference on.
TOLERANCE = 1e-4


def run_tool(tool: str, *arguments: str | Path, on_cpu: bool = False) -> None:
    """Run a tool as a person would; on the CPU by hiding the devices."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(ROOT / "tools" / tool), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def pretrain(corpus: Corpus, folder: Path, *more: str, on_cpu: bool = False) -> TrainingRun:
    run_tool(
        "pretrain_gpt.py",
        *("--corpus", corpus.root, "--run-dir", folder, "--model-size", "nano"),
        *("--seq-length", "32", "--train-iters", str(STEPS), "--global-batch-size", "8"),
        *("--micro-batch-size", "4", "--lr", "3e-3", "--lr-warmup-iters", "2"),
        *("--log-interval", "1", "--save-interval", "6", *more),
        on_cpu=on_cpu,
    )
    return TrainingRun.load(folder)


def losses(run: TrainingRun) -> list[float]:
    return [record["loss"] for record in run.metrics()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def cpu_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    return pretrain(corpus, tmp_path_factory.mktemp("cpu") / "run", on_cpu=True)


@pytest.fixture(scope="module")
def gpu_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    return pretrain(corpus, tmp_path_factory.mktemp("gpu") / "run")


def test_losses_are_those_of_the_cpu(cpu_run: TrainingRun, gpu_run: TrainingRun) -> None:
    assert len(losses(gpu_run)) == STEPS
    np.testing.assert_allclose(losses(gpu_run), losses(cpu_run), atol=TOLERANCE)
    assert losses(gpu_run)[0] - losses(gpu_run)[-1] > 100 * TOLERANCE


def test_the_distributed_optimizer_changes_nothing(
    corpus: Corpus, gpu_run: TrainingRun, tmp_path: Path
) -> None:
    run = pretrain(corpus, tmp_path / "run", "--use-distributed-optimizer")
    np.testing.assert_allclose(losses(run), losses(gpu_run), atol=1e-5)


def test_bf16_trains_close_to_fp32(corpus: Corpus, gpu_run: TrainingRun, tmp_path: Path) -> None:
    run = pretrain(corpus, tmp_path / "run", "--bf16")
    np.testing.assert_allclose(losses(run), losses(gpu_run), atol=2e-2)


def test_a_run_begun_on_the_cpu_goes_on_on_the_gpu(
    corpus: Corpus, cpu_run: TrainingRun, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", str(cpu_run.root), str(folder)], check=True)
    last = folder / cpu_run.checkpoints[-1]
    subprocess.run(["rm", "-r", str(last)], check=True)
    run = pretrain(corpus, folder)
    assert run.status == "finished"
    np.testing.assert_allclose(losses(run), losses(cpu_run), atol=TOLERANCE)


def test_embeddings_and_perplexity_are_those_of_the_cpu(
    corpus: Corpus, cpu_run: TrainingRun, tmp_path: Path
) -> None:
    for place, on_cpu in (("cpu", True), ("gpu", False)):
        common = ("--corpus", corpus.root, "--checkpoint", cpu_run.root, "--output")
        run_tool("compute_mixture.py", *common, tmp_path / place / "mixture.json", on_cpu=on_cpu)
        run_tool("evaluate.py", "perplexity", *common, tmp_path / f"{place}.json", on_cpu=on_cpu)
    stores = [EmbeddingStore.load(tmp_path / place / "embeddings") for place in ("cpu", "gpu")]
    for name in corpus.names:
        on_cpu_vectors, on_gpu_vectors = (store.vectors(name) for store in stores)
        np.testing.assert_allclose(on_gpu_vectors, on_cpu_vectors, atol=1e-4)
    results = [EvaluationResult.load(tmp_path / f"{place}.json") for place in ("cpu", "gpu")]
    for name in corpus.names:
        on_cpu_loss, on_gpu_loss = (result.domains[name].loss for result in results)
        assert on_gpu_loss == pytest.approx(on_cpu_loss, abs=TOLERANCE)


def test_the_doctor_names_the_device() -> None:
    import torch

    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "doctor.py"), "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert torch.cuda.get_device_name(0) in json.dumps(json.loads(done.stdout))


def test_compiled_layers_train_as_plain_ones(
    corpus: Corpus, gpu_run: TrainingRun, tmp_path: Path
) -> None:
    run = pretrain(corpus, tmp_path / "run", "--compile-layers")
    np.testing.assert_allclose(losses(run), losses(gpu_run), atol=TOLERANCE)
