"""Results that others published, where a copy of them lies beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "MEGATRON_CHAMELEON_VALIDATION"
BESIDE = Path(__file__).resolve().parents[4] / "shared" / "validation"


def public_results(name: str) -> Path:
    """The folder ``name`` of the results; the test is skipped where there is none."""
    folder = Path(os.environ.get(VARIABLE, BESIDE)) / name
    if not folder.is_dir():
        pytest.skip(f"the published results {folder} are not there; {VARIABLE} says where they are")
    return folder
