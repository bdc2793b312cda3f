"""The launchers of examples/baselines that train nothing, run as they are with SIZE=tiny."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import Corpus, Mixture
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


@pytest.mark.parametrize("name", MODEL_FREE)
def test_it_leaves_its_mixture(name, small, tmp_path):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"SIZE": "tiny", "CORPUS": str(small.root), "RUN": str(tmp_path)}
    done = subprocess.run(
        ["bash", f"examples/baselines/{name}.sh"],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    mixture = Mixture.load(tmp_path / f"4-mixture/{MODEL_FREE[name]}.json")
    assert mixture.method == name
    assert list(mixture.weights) == small.names
    assert mixture.epochs is not None
    assert f"{MODEL_FREE[name]}.json; next: tools/pretrain_gpt.py" in done.stdout
