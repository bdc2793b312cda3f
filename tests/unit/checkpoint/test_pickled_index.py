"""A checkpoint's files can make tensors and records, and run nothing."""

from __future__ import annotations

import pickle

import pytest
import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint.load import load_training, load_weights
from megatron_chameleon.checkpoint.pickled_index import INDEX_NAME, check_index
from megatron_chameleon.checkpoint.reader import open_reader
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state, training_state
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.training.optimizer import build_optimizer, build_scheduler, data_parallel
from tests.unit.checkpoint.pickled_code import PickledCode
from tests.unit.checkpoint.test_checkpoint_round_trip import OPTIONS, SHAPE, record_at, train


@pytest.fixture
def record(one_rank, tmp_path):
    model = build_model(SHAPE, one_rank, seed=5)
    save_checkpoint(model_state([model]), record_at(tmp_path / "step"))
    return CheckpointRecord.load(tmp_path / "step")


def test_code_in_the_index_is_refused_and_not_run(one_rank, record, tmp_path):
    trace = tmp_path / "ran"
    (record.root / INDEX_NAME).write_bytes(pickle.dumps([PickledCode(trace)]))
    model = build_model(SHAPE, one_rank, seed=0)
    with pytest.raises(UserError, match=r"\.metadata is not the index .*it asks for posix\.mkdir"):
        load_weights(record, [model])
    assert not trace.exists()
    # What would have been run otherwise:
    with pytest.raises(CheckpointException):
        dist_checkpointing.load(model_state([model]), str(record.root))
    assert trace.exists()


def test_code_in_the_small_values_is_refused_and_not_run(one_rank, record, tmp_path):
    trace = tmp_path / "ran"
    torch.save({"scheduler": PickledCode(trace)}, record.root / "common.pt")
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
        open_reader(record, one_rank)
    assert not trace.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", b"no pickle", pickle.dumps(torch.load), pickle.dumps([])]
)
def test_a_damaged_index_is_told_in_one_line(tmp_path, content):
    (tmp_path / INDEX_NAME).write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata is not the index of a checkpoint") as refused:
        check_index(tmp_path)
    assert "\n" not in str(refused.value)


def test_an_index_that_is_gone_is_told_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*\.metadata: No such file"):
        check_index(tmp_path)


@pytest.mark.parametrize("load", [load_weights, load_training])
def test_torch_is_never_asked_to_unpickle_anything(one_rank, tmp_path, monkeypatch, load):
    model = data_parallel([build_model(SHAPE, one_rank, seed=1)], one_rank, bf16=False)
    optimizer = build_optimizer(model, OPTIONS, one_rank, bf16=False)
    trainer = model, optimizer, build_scheduler(optimizer, OPTIONS, train_iters=10)
    train(trainer, 1, 2)
    save_checkpoint(training_state(*trainer, is_loading=False), record_at(tmp_path / "step"))
    asked = []
    real = torch.load

    def watched(*arguments, **options):
        asked.append(options.get("weights_only", True))
        return real(*arguments, **options)

    monkeypatch.setattr(torch, "load", watched)
    record = CheckpointRecord.load(tmp_path / "step")
    load(record, *(trainer if load is load_training else trainer[:1]))
    assert len(asked) > 10
    assert all(asked)
