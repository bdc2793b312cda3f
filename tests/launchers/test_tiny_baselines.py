"""The launchers of examples/baselines, run as they are with SIZE=tiny."""

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

# Launcher -> the mixture that it leaves.
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
def test_it_leaves_its_mixture(name, small, tmp_path):
    done = launched(name, small, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    mixture = Mixture.load(tmp_path / f"4-mixture/{MODEL_FREE[name]}.json")
    assert mixture.method == name
    assert list(mixture.weights) == small.names
    assert mixture.epochs is not None
    assert f"{MODEL_FREE[name]}.json; next: tools/pretrain_gpt.py" in done.stdout


@pytest.mark.parametrize("name", ["doge", "doremi", "regmix", "mixing_laws"])
def test_it_trains_its_proxies_and_leaves_its_mixture(name, small, tmp_path):
    method = name.replace("_", "-")
    done = launched(name, small, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{method}.json; next: tools/pretrain_gpt.py" in done.stdout
    mixture = Mixture.load(tmp_path / f"4-mixture/{method}.json")
    assert mixture.method == method
    assert list(mixture.weights) == small.names
    paid = ledger_of(RunFolder.load(tmp_path)).mixtures[method]
    assert paid.missing == ()
    assert paid.cost.flops == pytest.approx(mixture.parameters["total_cost"]["flops"])
    assert paid.cost.flops > 0
