"""Published results of other projects, read from a local copy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "MEGATRON_CHAMELEON_VALIDATION"
DEFAULT_FOLDER = Path(__file__).resolve().parents[4] / "shared" / "validation"


def public_results(name: str) -> Path:
    """Return the folder ``name`` of the published results; skip the test if it is missing."""
    folder = Path(os.environ.get(VARIABLE, DEFAULT_FOLDER)) / name
    if not folder.is_dir():
        pytest.skip(f"no published results at {folder}; set {VARIABLE} to their folder")
    return folder
