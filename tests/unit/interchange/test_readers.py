"""Samples of other trainers that read our exports.

Their packages are no dependencies of ours: they are installed here into a virtual environment, and
skipped if pip does not find them.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.small_corpus import EOD, STATES

READERS = Path(__file__).parent / "readers"
SEQUENCE_LENGTH = 32
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """``environment(package)``: the python of a fresh virtual environment that has the package."""
    folder = tmp_path_factory.mktemp("readers")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    constraints = folder / "constraints.txt"
    # The installed torch, so that packages do not bring another.
    torch = importlib.metadata.version("torch").partition("+")[0]
    constraints.write_text(f"torch=={torch}\n")
    installed: set[str] = set()

    def install(package):
        if package in installed:
            return
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "--constraint", constraints, package], capture_output=True, text=True
        )
        if f"No matching distribution found for {package}" in done.stderr:
            pytest.skip(f"pip does not find {package}")
        assert done.returncode == 0, done.stderr
        installed.add(package)

    def with_package(package):
        install("torch")
        install(package)
        return python

    return with_package


@pytest.fixture
def draw(environment, export, tmp_path):
    """``draw(package, reader, format, **options)``: the samples that the reader draws."""

    def samples(package, reader, chosen, **options):
        python = environment(package)
        exported = tmp_path / "export.json"
        exported.write_text(export(chosen, **options))
        command = [python, READERS / reader, exported, tmp_path, str(SEQUENCE_LENGTH)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "samples.json").read_text())

    return samples


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


def test_olmo_core_samples_with_the_exported_weights(draw, corpus, sampled, tmp_path):
    budget = 4 * sum(corpus.train_tokens.values())
    (tmp_path / "token_budget.json").write_text(json.dumps(budget))
    samples = draw("ai2-olmo-core", "olmo_core_reads.py", "olmo-core", token_budget=budget)
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


# 2,000 independent draws: 0.04 is nearly four standard deviations of a share.
@pytest.mark.parametrize(
    ("package", "reader", "chosen"),
    [
        ("litdata", "litdata_reads.py", "litgpt"),
        ("torchtitan", "torchtitan_reads.py", "torchtitan"),
    ],
)
def test_reader_samples_with_the_exported_weights(
    draw, corpus, sampled, tmp_path, package, reader, chosen
):
    for name in corpus.names:
        # Repeated, since litdata's sampling ends with the first exhausted data set.
        tokens = domain_tokens(corpus, name)
        (tmp_path / f"{name}.json").write_text(json.dumps(tokens.tolist() * 8))
        ends = np.flatnonzero(tokens == EOD) + 1
        texts = [" ".join(map(str, part)) for part in np.split(tokens, ends)[:-1]]
        lines = [json.dumps({"text": text}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    samples = draw(package, reader, chosen)
    assert len(samples) == 2000
    assert shares(samples, corpus) == pytest.approx(sampled, abs=0.04)
