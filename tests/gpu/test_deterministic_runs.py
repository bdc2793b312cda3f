"""With --deterministic, two runs on one CUDA device are bit-identical."""

from __future__ import annotations

import pytest

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.artifacts.checkpoint import step_folder
from tests.gpu.conftest import STEPS, losses

FLEX = ("--reset-attention-mask", "--document-attention", "flex")


@pytest.mark.parametrize("flags", [(), ("--bf16",), ("--reset-attention-mask",), FLEX])
def test_two_runs_are_bit_identical(tools, tmp_path, flags):
    first, second = (
        tools.pretrain(tmp_path / name, "--deterministic", *flags) for name in ("first", "second")
    )
    assert losses(first) == losses(second)
    hashes = {CheckpointRecord.load(step_folder(run.root, STEPS)).hash for run in (first, second)}
    assert len(hashes) == 1
