"""--deterministic on one CUDA device: the same bits twice."""

from __future__ import annotations

import pytest

from megatron_chameleon.artifacts import CheckpointRecord, Corpus
from megatron_chameleon.artifacts.checkpoint import step_folder
from tests.gpu.test_one_gpu import STEPS, losses, pretrain
from tests.small_corpus import write_small_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("flags", [(), ("--bf16",), ("--reset-attention-mask",)])
def test_two_runs_are_bit_identical(corpus, tmp_path, flags):
    first, second = (
        pretrain(corpus, tmp_path / name, "--deterministic", *flags) for name in ("first", "second")
    )
    assert losses(first) == losses(second)
    hashes = {CheckpointRecord.load(step_folder(run.root, STEPS)).hash for run in (first, second)}
    assert len(hashes) == 1
