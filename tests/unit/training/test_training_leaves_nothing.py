"""A run that has ended leaves nothing of its model in the process: the next one needs the room."""

from __future__ import annotations

import gc

import pytest
from megatron.core.distributed import DistributedDataParallel

from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training.trainer import pretrain


def models_in_memory():
    return {id(thing) for thing in gc.get_objects() if type(thing) is DistributedDataParallel}


@pytest.mark.parametrize("sharded", [False, True])
def test_the_model_is_freed(pretrain_options, tmp_path, sharded):
    parallel = TrainingParallelOptions(use_distributed_optimizer=sharded)
    before = models_in_memory()
    pretrain(pretrain_options(tmp_path / "run", parallel=parallel))
    assert not models_in_memory() - before
