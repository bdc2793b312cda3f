"""A checkpoint that reads text, and local copies of the tasks' data."""

from __future__ import annotations

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
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for --data-dir."""
    return write_task_data(tmp_path_factory.mktemp("tasks"), DOCUMENTS)
