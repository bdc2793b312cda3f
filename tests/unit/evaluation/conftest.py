"""A checkpoint that reads text, and local copies of the tasks' data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.task_data import write_task_data
from tests.text_checkpoint import TextCheckpoint, write_text_checkpoint

DOCUMENTS = 8


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TextCheckpoint:
    """For reading only."""
    return write_text_checkpoint(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder for --data-dir; what is made of it is cached in a folder of its own."""
    import datasets

    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
        yield write_task_data(folder / "data", DOCUMENTS)
