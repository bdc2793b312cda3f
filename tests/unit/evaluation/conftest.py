"""Fixture with a checkpoint whose tokenizer encodes text."""

from __future__ import annotations

import pytest

from tests.text_checkpoint import TextCheckpoint, write_text_checkpoint


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TextCheckpoint:
    """Checkpoint of a model with a tokenizer; tests must not change it."""
    return write_text_checkpoint(tmp_path_factory.mktemp("text"))
