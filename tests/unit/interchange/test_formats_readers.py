"""Other trainers read mixtures that were written for them.

OLMo-core is installed into a virtual environment, and the other packages into a folder, without the
packages that they require for other purposes. A test is skipped if pip does not find its package.
levanter takes 1.8 GB, so that its test only runs with an existing environment: LEVANTER_PYTHON is
the interpreter of one with marin-levanter (a pre-release; 0.2.20.dev202606180959 was tested) and
gitpython.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import SPLITS, Mixture, MixtureStage
from megatron_chameleon.interchange import write_mixture
from megatron_chameleon.interchange.options import PER_SPLIT
from tests.small_corpus import EOD, STATES

READERS = Path(__file__).parent / "readers"
SEQUENCE_LENGTH = 32
# Format -> package that reads it, and other packages that its reader imports.
PACKAGES = {
    "litgpt": ("litdata", "lightning-utilities"),
    "torchtitan": ("torchtitan", "torchdata", "torch-checkpointing", "spmd-types", "einops"),
    # It builds its helpers in C++. Earlier releases do not build two domains.
    "automodel": ("nemo-automodel>=0.7", "torchdata", "ninja"),
    "megatron-bridge": (
        *("megatron-bridge", "einops", "omegaconf", "antlr4-python3-runtime==4.9.3", "hydra-core"),
    ),
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python interpreter of a virtual environment with OLMo-core."""
    folder = tmp_path_factory.mktemp("readers")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python, constraints = folder / "venv/bin/python", folder / "constraints.txt"
    # The environment uses the installed torch, so that pip does not install another.
    torch = importlib.metadata.version("torch").partition("+")[0]
    constraints.write_text(f"torch=={torch}\n")
    for package in ("torch", "ai2-olmo-core"):
        install(python, "--constraint", constraints, packages=[package])
    return python


def install(python, *options, packages):
    """Install packages; skip the test if pip does not find one of them."""
    pip = [python, "-m", "pip", "install", "--quiet", *options, *packages]
    done = subprocess.run(pip, capture_output=True, text=True)
    for package in packages:
        if f"No matching distribution found for {package}" in done.stderr:
            pytest.skip(f"pip does not find {package}")
    assert done.returncode == 0, done.stderr


def run_reader(python, name, *arguments, **environment):
    """Run a script of the folder readers; return the last line that it prints."""
    done = subprocess.run(
        [python, READERS / name, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().rpartition("\n")[-1]


def domain_tokens(corpus, name):
    return np.fromfile(f"{corpus.prefix(name, 'train')}.bin", np.uint16)


def shares(samples, corpus):
    """Domain -> its share of the samples, recognised by the domain's frequent tokens."""
    frequent = {
        name: {token for token, _ in Counter(domain_tokens(corpus, name)).most_common(STATES + 1)}
        - {EOD}
        for name in corpus.names
    }
    origins = Counter(
        max(frequent, key=lambda name: sum(token in frequent[name] for token in sample))
        for sample in samples
    )
    return {name: count / len(samples) for name, count in origins.items()}


def test_olmo_core_samples_with_the_exported_weights(python, export, corpus, sampled, tmp_path):
    budget = 4 * sum(corpus.train_tokens.values())
    (tmp_path / "token_budget.json").write_text(json.dumps(budget))
    exported = tmp_path / "export.yaml"
    exported.write_text(export("olmo-core", token_budget=budget))
    run_reader(python, "olmo_core_reads.py", exported, tmp_path, SEQUENCE_LENGTH)
    samples = json.loads((tmp_path / "samples.json").read_text())
    assert len(samples) * SEQUENCE_LENGTH == pytest.approx(budget, rel=0.01)
    assert shares(samples, corpus) == pytest.approx(sampled, abs=0.01)
    windows = {
        tuple(window)
        for name in sampled
        for window in np.lib.stride_tricks.sliding_window_view(
            domain_tokens(corpus, name), SEQUENCE_LENGTH
        ).tolist()
    }
    assert all(tuple(sample) in windows for sample in samples)


def test_levanter_samples_with_the_exported_weights(corpus, weights, mixture_file, tmp_path):
    if not (python := os.environ.get("LEVANTER_PYTHON")):
        pytest.skip("LEVANTER_PYTHON is not set")
    later = dict(zip(weights, [0.25, 0.5, 0.25, 0.0], strict=True))
    mixture = dataclasses.replace(Mixture.load(mixture_file), stages=[MixtureStage(2000, later)])
    for each, blocks in ((mixture.at_step(0), 1), (mixture, 4)):
        path = tmp_path / "levanter.yaml"
        path.write_text(write_mixture(each, "levanter"))
        environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}
        arguments = (path, 1000, blocks)
        read = json.loads(run_reader(python, "levanter_reads.py", *arguments, **environment))
        stages = [weights] * min(blocks, 2) + [later] * max(blocks - 2, 0)
        for name in weights:  # a block has whole sequences
            expected = sum(1000 * stage[name] for stage in stages)
            assert read["counts"].get(name, 0) == pytest.approx(expected, abs=blocks)
    assert read["weights"] == [[0, weights], [2000, later]]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_trainer_reads_the_exact_weights(name, export, corpus, sampled, tmp_path):
    folder = tmp_path / "p"
    install(sys.executable, "--no-deps", "--target", folder, packages=PACKAGES[name])
    if name == "automodel" and not shutil.which("c++"):
        pytest.skip("NeMo Automodel needs a C++ compiler")
    written = tmp_path / "mixture.json"
    written.write_text(export(name))
    environment = {"PYTHONPATH": str(folder), "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    read = json.loads(run_reader(sys.executable, "mixture_reads.py", name, written, **environment))
    if name not in PER_SPLIT:
        assert read == pytest.approx(sampled, rel=1e-15)  # litdata divides by their sum
        return
    splits = zip(("train", "validation", "test"), SPLITS, strict=True)
    assert read == {
        theirs: [[str(corpus.prefix(domain, split)) for domain in sampled], [*sampled.values()]]
        for theirs, split in splits
    }
