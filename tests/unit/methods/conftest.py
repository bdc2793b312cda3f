"""Results that several test files of one method read, computed once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from megatron_chameleon.artifacts import Corpus


@pytest.fixture(scope="session")
def doremi_mixture(
    corpus: Corpus, finished_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A read-only mixture of DoReMi, next to its proxy."""
    from megatron_chameleon.methods.doremi.compute import compute_doremi
    from tests.unit.methods.doremi_runs import doremi_options

    output = tmp_path_factory.mktemp("found") / "doremi.json"
    assert compute_doremi(doremi_options(output, corpus=corpus.root, reference=finished_run))
    return output
