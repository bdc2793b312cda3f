"""Small runs of DoReMi, and readers of their results."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import CheckpointRecord, TrainingRun
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.methods.doremi.options import DoremiOptions, DoremiRule
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.training.options import OptimizerOptions

STEPS = 6
SLOW = DoremiRule(doremi_eta=0.1)


def proxy_options(**changes) -> ProxyOptions:
    """Six steps of a nano model, like the fixture ``finished_run``."""
    settings = {
        "model_size": "nano",
        "seq_length": 32,
        "train_iters": STEPS,
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "log_interval": 1,
        "save_interval": 3,
        "optimizer": OptimizerOptions(lr=1e-2, lr_warmup_iters=2),
    }
    return ProxyOptions(**{**settings, **changes})


def doremi_options(output, proxy=None, **changes) -> DoremiOptions:
    """A proxy of six steps, with a small step size of the weights."""
    settings = {"rule": SLOW, **changes}
    return DoremiOptions(output=output, proxy=proxy_options(**(proxy or {})), **settings)


@pytest.fixture
def options(corpus, finished_run, tmp_path):
    """``options(name, proxy, **changes)``: with a finished reference."""

    def make(name="doremi", proxy=None, **changes) -> DoremiOptions:
        given = {"corpus": corpus.root, "reference": finished_run, **changes}
        return doremi_options(tmp_path / "4-mixture" / f"{name}.json", proxy, **given)

    return make


@pytest.fixture
def found(doremi_mixture) -> Path:
    """A read-only mixture, next to its proxy."""
    return doremi_mixture


@pytest.fixture
def half_done(found, tmp_path):
    """A copy of that proxy at the path of the one that ``options()`` trains."""
    return Path(shutil.copytree(found.with_suffix(""), tmp_path / "4-mixture" / "doremi"))


def proxy_of(output: Path) -> TrainingRun:
    return TrainingRun.load(output.with_suffix("") / "proxy")


def hook_lines(output: Path) -> list[dict]:
    return [line["hook"] for line in proxy_of(output).metrics()]


def state_of(output: Path, step=STEPS):
    record = CheckpointRecord.load(step_folder(output.with_suffix("") / "proxy", step))
    assert record.hook is not None
    return record.hook.state
