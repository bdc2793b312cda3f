"""The launchers of examples/baselines with SIZE=tiny."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import Corpus, Mixture
from megatron_chameleon.report.cost import ledger_of
from megatron_chameleon.report.run_folder import RunFolder
from tests.distributed.launch import REPOSITORY
from tests.small_corpus import write_small_corpus

# Launcher -> name of its mixture.
MODEL_FREE = {
    "uniform": "uniform",
    "natural": "natural",
    "unimax": "unimax",
    "manual": "printed-uniform",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Corpus:
    return write_small_corpus(tmp_path_factory.mktemp("corpus"))


def launched(name: str, corpus: Corpus, run: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"SIZE": "tiny", "CORPUS": str(corpus.root), "RUN": str(run)}
    return subprocess.run(
        ["bash", f"examples/baselines/{name}.sh"],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", MODEL_FREE)
def test_model_free_launcher_writes_its_mixture(name, small, tmp_path):
    done = launched(name, small, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    mixture = Mixture.load(tmp_path / f"4-mixture/{MODEL_FREE[name]}.json")
    assert mixture.method == name
    assert list(mixture.weights) == small.names
    assert mixture.epochs is not None


@pytest.mark.parametrize(
    "name", ["doge", "doremi", "regmix", pytest.param("mixing_laws", marks=pytest.mark.slow)]
)
def test_launcher_trains_proxies_and_writes_its_mixture(name, small, tmp_path):
    method = name.replace("_", "-")
    done = launched(name, small, tmp_path)
    assert done.returncode == 0, done.stderr
    mixture = Mixture.load(tmp_path / f"4-mixture/{method}.json")
    assert mixture.method == method
    assert list(mixture.weights) == small.names
    paid = ledger_of(RunFolder.load(tmp_path)).mixtures[method]
    assert paid.missing == ()
    assert paid.cost.flops == pytest.approx(mixture.parameters["total_cost"]["flops"])
    assert paid.cost.flops > 0
