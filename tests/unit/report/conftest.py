"""Random numbers, and a corpus of tokens for methods that run on the folders' domains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="session")
def corpus_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a corpus of the run folders' domains, for reading only."""
    from tests.small_corpus import write_small_corpus
    from tests.unit.report.report_samples import NAMES

    return write_small_corpus(tmp_path_factory.mktemp("corpus"), NAMES).root
