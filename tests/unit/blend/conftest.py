"""Corpora of random tokens with chosen document lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import SPLITS, Corpus
from tests.small_corpus import EOD, Documents, write_corpus


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[..., Corpus]:
    """``make_corpus({"a": [5, 3]})`` writes a domain "a" with documents of 5 and 3 tokens."""

    def make(lengths: dict[str, list[int]], folder: str = "corpus") -> Corpus:
        rng = np.random.default_rng(0)
        documents: Documents = {
            name: {split: [rng.integers(1, EOD, n - 1) for n in of_domain] for split in SPLITS}
            for name, of_domain in lengths.items()
        }
        return write_corpus(tmp_path / folder, documents)

    return make
