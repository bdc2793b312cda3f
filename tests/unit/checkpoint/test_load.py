"""Saving and loading on one rank; other layouts are in tests/distributed."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import re
from pathlib import Path

import psutil
import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint import save
from megatron_chameleon.checkpoint.load import (
    load_training,
    open_reader,
    shape_of,
)
from megatron_chameleon.checkpoint.save import Handover, save_checkpoint
from megatron_chameleon.checkpoint.state import (
    model_state,
    training_state,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model, unwrap
from tests.unit.checkpoint.samples import SHAPE, record_at, train, trainer_of


def weights_of(model):
    return {name: p.detach().clone() for name, p in unwrap(model).named_parameters()}


@pytest.fixture
def saved(one_rank, tmp_path):
    """A model and the record of its checkpoint on disk."""
    model = build_model(SHAPE, one_rank, seed=5)
    save_checkpoint(model_state([model]), record_at(tmp_path / "step"))
    return model, CheckpointRecord.load(tmp_path / "step")


@pytest.mark.parametrize("bf16", [False, True])
def test_a_reader_has_the_saved_weights_in_fp32(one_rank, tmp_path, bf16):
    processes = psutil.Process().children(recursive=True)
    model = build_model(SHAPE, one_rank, seed=5, bf16=bf16)
    save_checkpoint(model_state([model]), record_at(tmp_path / "step"))
    # megatron would start a server for its results, which outlives a killed rank.
    assert psutil.Process().children(recursive=True) == processes
    record = CheckpointRecord.load(tmp_path / "step")
    assert set(record.files) == {p.name for p in record.root.iterdir()} - {"checkpoint.json"}
    record.verify()
    reader = open_reader(record, one_rank)
    assert reader.shape == SHAPE
    assert not reader.model.training
    for name, weight in weights_of(model).items():
        read = reader.model.get_parameter(name)
        assert read.dtype == torch.float32, name
        assert torch.equal(read, weight.float()), name


def test_a_killed_save_leaves_no_checkpoint_and_the_next_one_cleans_up(
    one_rank, tmp_path, monkeypatch
):
    model, record = build_model(SHAPE, one_rank, seed=5), record_at(tmp_path / "step")

    def killed(*_arguments, **_more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(save, "hash_files", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(model_state([model]), record)
    assert not record.root.exists()
    (left,) = (path.name for path in tmp_path.iterdir())
    assert re.fullmatch(r"\.step\.\w+\.tmp", left)
    save_checkpoint(model_state([model]), record)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    CheckpointRecord.load(record.root).verify()


def test_a_save_replaces_the_old_checkpoint_as_a_whole_or_not_at_all(one_rank, saved, monkeypatch):
    _, old = saved
    (old.root / "left over").write_text("of before")
    real = os.replace

    def refuse(source, target):
        if Path(target) == old.root and Path(source).name.endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    model = build_model(SHAPE, one_rank, seed=6)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with pytest.raises(UserError, match="Input/output error"):
            save_checkpoint(model_state([model]), old)
    assert [path.name for path in old.root.parent.iterdir()] == ["step"]
    found = CheckpointRecord.load(old.root)
    found.verify()
    assert found.hash == old.hash
    save_checkpoint(model_state([model]), old)
    assert not (old.root / "left over").exists()
    read = weights_of(open_reader(CheckpointRecord.load(old.root), one_rank).model)
    assert all(torch.equal(read[name], weight) for name, weight in weights_of(model).items())


WRONG_SHAPES = [
    {"size": {"num_layers": 2}},
    {"size": {**dataclasses.asdict(SHAPE.size), "num_layers": 10**9}},
    {"vocab_size": "many"},
    {"vocab_size": 10**12},
]


@pytest.mark.parametrize("change", WRONG_SHAPES, ids=str)
def test_a_shape_that_is_invalid_or_too_large_for_the_files_is_rejected(saved, change):
    record = dataclasses.replace(saved[1], model={**dataclasses.asdict(SHAPE), **change})
    with pytest.raises(UserError, match=r"/checkpoint\.json: field model"):
        shape_of(record)


def test_a_model_of_another_shape_is_rejected(one_rank, saved):
    model = dataclasses.asdict(SHAPE)
    for change in ({"num_layers": 3}, {"hidden_size": 16, "ffn_hidden_size": 32}):
        record = dataclasses.replace(saved[1], model={**model, "size": {**model["size"], **change}})
        with pytest.raises(UserError, match="use another checkpoint"):
            open_reader(record, one_rank)


def test_a_file_missing_from_the_record_is_not_read(one_rank, saved):
    record = saved[1]
    for name in record.files:
        files = {other: file for other, file in record.files.items() if other != name}
        dataclasses.replace(record, files=files).save()
        with pytest.raises(UserError, match=f"field files: {re.escape(name)} "):
            CheckpointRecord.load(record.root)
        if name.endswith(".distcp"):
            with pytest.raises(UserError, match=f"{name}.* is not listed"):
                open_reader(dataclasses.replace(record, files=files), one_rank)


def sample():
    """The next numbers of the default generator, and of megatron's within tensor parallelism."""
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(3)
    return torch.cat([torch.rand(3), tracked])


@pytest.mark.parametrize("sharded", [False, True])
def test_training_resumes_bit_for_bit(one_rank, tmp_path, sharded):
    layout = dataclasses.replace(one_rank, use_distributed_optimizer=sharded)
    straight = trainer_of(layout, seed=1)
    train(straight, 1, 4)
    torch.manual_seed(17)
    sample()
    state = training_state(*straight, is_loading=False)
    save_checkpoint(state, record_at(tmp_path / "step"))
    expected = sample()
    assert not torch.equal(sample(), expected)
    train(straight, 5, 8)

    resumed = trainer_of(layout, seed=2)
    load_training(CheckpointRecord.load(tmp_path / "step"), *resumed)
    assert torch.equal(sample(), expected)
    train(resumed, 5, 8)
    assert resumed[1].param_groups[0]["lr"] == straight[1].param_groups[0]["lr"]
    for name, weight in weights_of(resumed[0][0]).items():
        assert torch.equal(weight, unwrap(straight[0][0]).get_parameter(name)), name
    if sharded:  # megatron would share one step tensor, which counts once per parameter
        parts = getattr(resumed[1], "chained_optimizers", [resumed[1]])
        steps = [state["step"] for part in parts for state in part.optimizer.state.values()]
        assert len({id(step) for step in steps}) == len(steps)
        assert [float(step) for step in steps] == [8.0] * len(steps)


def test_a_value_larger_than_a_pipe_is_read_after_its_process_ended():
    handover, value = Handover(), list(range(1_000_000))
    process = multiprocessing.get_context("fork").Process(target=handover.put, args=(value,))
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert handover.get() == value
