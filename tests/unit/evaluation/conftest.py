"""A checkpoint that reads text, local copies of the tasks' data, and an evaluation to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.task_data import write_task_data
from tests.text_checkpoint import TextCheckpoint, write_text_checkpoint

if TYPE_CHECKING:
    from megatron_chameleon.artifacts import Corpus, EvaluationResult
    from megatron_chameleon.evaluation.options import PerplexityOptions

DOCUMENTS = 8


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TextCheckpoint:
    """For reading only."""
    return write_text_checkpoint(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for --data-dir."""
    return write_task_data(tmp_path_factory.mktemp("tasks"), DOCUMENTS)


@pytest.fixture
def perplexity_options(corpus: Corpus, finished_run: Path, tmp_path: Path) -> PerplexityOptions:
    """One evaluation of the finished run."""
    from megatron_chameleon.evaluation.options import PerplexityOptions

    return PerplexityOptions(
        corpus=corpus.root,
        checkpoint=finished_run,
        output=tmp_path / "result.json",
        overwrite=True,
    )


@pytest.fixture
def evaluate(perplexity_options: PerplexityOptions) -> Callable[..., EvaluationResult]:
    """``evaluate(**changes)``: the result of one evaluation of the finished run."""
    from megatron_chameleon.evaluation.perplexity import evaluate_perplexity

    return lambda **changes: evaluate_perplexity(dataclasses.replace(perplexity_options, **changes))
