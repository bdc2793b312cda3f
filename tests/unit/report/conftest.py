"""Fixtures of the report's tests: a random generator, and a run folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit.report.samples import write_run_folder


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_run_folder(tmp_path / "run")
