"""Run examples/compare_methods.sh with SIZE=tiny, interrupt the script, and resume it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_chameleon.artifacts import EvaluationResult, TrainingRun
from tests.distributed.launch import REPOSITORY
from tests.small_corpus import DOMAINS, write_small_corpus

SECONDS = 900.0  # limit on a loaded machine
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("comparison")
    write_small_corpus(root / "corpus")
    choices = {"SIZE": "tiny", "CORPUS": str(root / "corpus"), "RUN": str(root / "run")}
    choices |= {"METHODS": "unimax uniform chameleon", "RECORD": str(root / "record.json")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **choices, "PATH": path}


def start(environment: dict[str, str]) -> subprocess.Popen[str]:
    command = ["bash", "examples/compare_methods.sh"]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_interrupted_comparison_resumes(environment):
    run = Path(environment["RUN"])
    with start(environment) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("started: uniform-seed2"):
                break
        time.sleep(1.0)
        jobs = psutil.Process(first.pid).children()
        first.send_signal(signal.SIGTERM)  # schedulers, too, may signal only the script
        assert first.wait(timeout=SECONDS) == 130
        assert jobs
        assert not any(job.is_running() for job in jobs)
    done = [path for path in run.glob("5-base/*") if TrainingRun.exists(path)]
    assert len(done) < 6
    with start(environment) as second:
        printed, _ = second.communicate(timeout=SECONDS)
    assert second.returncode == 0, printed
    assert "0 of 16 jobs are done" not in printed
    runs = {path.name: TrainingRun.load(path) for path in run.glob("5-base/*")}
    assert set(runs) == {f"{name}-seed{s}" for name in ("uniform", "chameleon") for s in (1, 2, 3)}
    assert {(r.status, r.step) for r in runs.values()} == {("finished", 12)}
    record = json.loads(Path(environment["RECORD"]).read_text())
    for name, figures in record["mixtures"].items():
        shown = "uniform" if name == "unimax" else name
        for seed in (1, 2, 3):
            path = run / f"6-evaluation/{shown}-seed{seed}.json"
            expected = {n: d.perplexity for n, d in EvaluationResult.load(path).domains.items()}
            assert figures["perplexity"][f"seed {seed}"] == pytest.approx(expected)
        assert list(figures["weights"]) == list(DOMAINS)
    assert (run / "7-report/compare_methods.txt").read_text() in printed
    proxy = TrainingRun.load(run / "2-proxy/nano-seed1")
    assert record["mixtures"]["chameleon"]["flops"] > proxy.cost.flops


def test_evaluation_of_other_weights_is_repeated(environment):
    """Resume in the folder of the test above, which must run first."""
    path = Path(environment["RUN"]) / "6-evaluation/chameleon-seed2.json"
    ours = EvaluationResult.load(path)
    others = path.with_name("uniform-seed2.json")
    shutil.copy(others, path)
    with start(environment) as third:
        printed, _ = third.communicate(timeout=SECONDS)
    assert third.returncode == 0, printed
    assert "15 of 16 jobs are done" in printed
    assert EvaluationResult.load(path).checkpoint_hash == ours.checkpoint_hash
    assert EvaluationResult.load(path).domains == ours.domains
