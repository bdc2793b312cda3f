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
        pip = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints, package]
        done = subprocess.run(pip, capture_output=True, text=True)
        if f"No matching distribution found for {package}" in done.stderr:
            pytest.skip(f"pip does not find {package}")
        assert done.returncode == 0, done.stderr
    return python


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
    command = [python, READERS / "olmo_core_reads.py", exported, tmp_path, str(SEQUENCE_LENGTH)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
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
        command = [python, READERS / "levanter_reads.py", path, "1000", str(blocks)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        read = json.loads(done.stdout.splitlines()[-1])
        stages = [weights] * min(blocks, 2) + [later] * max(blocks - 2, 0)
        for name in weights:  # a block has whole sequences
            expected = sum(1000 * stage[name] for stage in stages)
            assert read["counts"].get(name, 0) == pytest.approx(expected, abs=blocks)
    assert read["weights"] == [[0, weights], [2000, later]]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_trainer_reads_the_exact_weights(name, export, corpus, sampled, tmp_path):
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        tmp_path / "p",
    ]
    done = subprocess.run([*pip, *PACKAGES[name]], capture_output=True, text=True)
    if "No matching distribution found" in done.stderr:
        pytest.skip(f"pip does not find {' '.join(PACKAGES[name])}")
    assert done.returncode == 0, done.stderr
    if name == "automodel" and not shutil.which("c++"):
        pytest.skip("NeMo Automodel needs a C++ compiler")
    written = tmp_path / "mixture.json"
    written.write_text(export(name))
    done = subprocess.run(
        [sys.executable, READERS / "mixture_reads.py", name, written],
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path / "p"),
            "PATH": f"{tmp_path / 'p' / 'bin'}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    if name not in PER_SPLIT:
        assert read == pytest.approx(sampled, rel=1e-15)  # litdata divides by their sum
        return
    splits = zip(("train", "validation", "test"), SPLITS, strict=True)
    assert read == {
        theirs: [[str(corpus.prefix(domain, split)) for domain in sampled], [*sampled.values()]]
        for theirs, split in splits
    }
