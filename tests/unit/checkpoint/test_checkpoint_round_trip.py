"""Weights through a checkpoint on disk, on one rank. Other layouts are in tests/distributed."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from pathlib import Path

import psutil
import pytest
import torch

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint import save
from megatron_chameleon.checkpoint.load import (
    load_training,
    open_reader,
    require_tokenizer,
    shape_of,
)
from megatron_chameleon.checkpoint.optimizer_fixes import prepare_for_loading
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state, training_state
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.options.training import OptimizerOptions
from megatron_chameleon.training.optimizer import build_optimizer, build_scheduler, data_parallel
from tests.unit.artifacts.artifact_samples import PROVENANCE

SHAPE = ModelShape(ModelSize(2, 2, 32, 64), vocab_size=100, max_sequence_length=16)
OPTIONS = OptimizerOptions(lr=1e-2, min_lr=1e-3, lr_warmup_iters=3)


def record_at(folder, shape=SHAPE):
    return CheckpointRecord(
        root=folder,
        model=dataclasses.asdict(shape),
        step=3,
        samples=24,
        domain_samples={},
        mixture_phases=[],
        domain_tokens={},
        tokenizer_hash="t" * 64,
        corpus_hash="c" * 64,
        mixture_hash="m" * 64,
        layout={},
        files={},
        provenance=PROVENANCE,
    )


def weights_of(model):
    return {name: p.detach().clone() for name, p in unwrap(model).named_parameters()}


@pytest.fixture
def saved(one_rank, tmp_path):
    """A model and the record of its checkpoint on disk."""
    model = build_model(SHAPE, one_rank, seed=5)
    save_checkpoint(model_state([model]), record_at(tmp_path / "step"))
    return model, CheckpointRecord.load(tmp_path / "step")


def test_a_reader_has_the_weights_that_were_saved(one_rank, saved):
    model, record = saved
    reader = open_reader(record, one_rank)
    assert reader.shape == SHAPE
    assert not reader.model.training
    for name, weight in weights_of(reader.model).items():
        assert torch.equal(weight, dict(model.named_parameters())[name]), name


def test_the_record_lists_every_file_and_its_hash(saved):
    _, record = saved
    on_disk = {path.name for path in record.root.iterdir()}
    assert set(record.files) == on_disk - {"checkpoint.json"}
    assert len(record.files) > 2
    record.verify()


def test_saving_leaves_no_process_beside_this_one(one_rank, tmp_path):
    """megatron would start a server for its results, which outlives a rank that is killed."""
    before = psutil.Process().children(recursive=True)
    model = build_model(SHAPE, one_rank, seed=5)
    save_checkpoint(model_state([model]), record_at(tmp_path / "step"))
    assert psutil.Process().children(recursive=True) == before


def test_weights_in_bf16_are_read_in_fp32(one_rank, tmp_path):
    model = build_model(SHAPE, one_rank, seed=5, bf16=True)
    save_checkpoint(model_state([model]), record_at(tmp_path / "step"))
    reader = open_reader(CheckpointRecord.load(tmp_path / "step"), one_rank)
    for name, weight in weights_of(model).items():
        read = reader.model.get_parameter(name)
        assert read.dtype == torch.float32, name
        assert torch.equal(read, weight.float()), name


def test_a_step_saved_again_takes_the_place_of_the_old_one(one_rank, saved):
    _, old = saved
    (old.root / "left over").write_text("of before")
    model = build_model(SHAPE, one_rank, seed=6)
    save_checkpoint(model_state([model]), old)
    new = CheckpointRecord.load(old.root)
    assert new.hash != old.hash
    assert not (old.root / "left over").exists()
    read = weights_of(open_reader(new, one_rank).model)
    assert all(torch.equal(read[name], weight) for name, weight in weights_of(model).items())


def test_a_killed_save_leaves_no_checkpoint_and_the_next_one_clears_up(
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


def test_a_step_saved_again_that_cannot_be_put_in_place_leaves_the_old_one(
    one_rank, saved, monkeypatch
):
    _, old = saved
    real = os.replace

    def refuse(source, target):
        if Path(target) == old.root and Path(source).name.endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    model = build_model(SHAPE, one_rank, seed=6)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with pytest.raises(UserError, match=r"Input/output error.* earlier checkpoints are"):
            save_checkpoint(model_state([model]), old)
    assert [path.name for path in old.root.parent.iterdir()] == ["step"]
    found = CheckpointRecord.load(old.root)
    found.verify()
    assert found.hash == old.hash


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ({}, "model.size"),
        ({"size": {"num_layers": 2}, "vocab_size": 1}, "model.size.num_attention_heads"),
        ({**dataclasses.asdict(SHAPE), "vocab_size": "many"}, "model.vocab_size"),
        (
            {
                **dataclasses.asdict(SHAPE),
                "size": {**dataclasses.asdict(SHAPE.size), "num_attention_heads": 5},
            },
            "model.size",
        ),
    ],
)
def test_a_record_without_a_models_shape_is_refused_by_the_field(tmp_path, model, field):
    record = dataclasses.replace(record_at(tmp_path), model=model)
    with pytest.raises(UserError, match=rf"/checkpoint\.json: field {field}: ") as refused:
        shape_of(record)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 10**9},
        {"num_layers": 10**30},
        {"num_layers": -1},
        {"num_layers": True},
        {"num_layers": 2.0},
        {"num_attention_heads": 0},
        {"hidden_size": 2**40},
        {"ffn_hidden_size": None},
    ],
)
def test_a_shape_that_the_files_cannot_hold_is_refused(saved, change):
    model = dataclasses.asdict(SHAPE)
    record = dataclasses.replace(saved[1], model={**model, "size": {**model["size"], **change}})
    with pytest.raises(UserError, match=r"checkpoint\.json: field model"):
        shape_of(record)
    for name, value in (("vocab_size", -5), ("max_sequence_length", 0), ("vocab_size", 10**12)):
        with pytest.raises(UserError, match=r"checkpoint\.json: field model"):
            shape_of(dataclasses.replace(saved[1], model={**model, name: value}))


def test_the_shape_is_read_back(saved):
    assert shape_of(saved[1]) == SHAPE


def test_a_model_of_another_shape_than_the_files_is_refused(one_rank, saved):
    model = dataclasses.asdict(SHAPE)
    for change in ({"num_layers": 3}, {"hidden_size": 16, "ffn_hidden_size": 32}):
        record = dataclasses.replace(saved[1], model={**model, "size": {**model["size"], **change}})
        with pytest.raises(UserError, match="use another checkpoint"):
            open_reader(record, one_rank)


def test_a_file_that_the_record_does_not_list_is_not_read(one_rank, saved):
    record = saved[1]
    for name in record.files:
        files = {other: file for other, file in record.files.items() if other != name}
        dataclasses.replace(record, files=files).save()
        with pytest.raises(UserError, match=f"field files: {re.escape(name)} "):
            CheckpointRecord.load(record.root)
        if name.endswith(".distcp"):
            with pytest.raises(UserError, match=f"{name}.* is not listed"):
                open_reader(dataclasses.replace(record, files=files), one_rank)


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path, corpus):
    record = dataclasses.replace(record_at(tmp_path), tokenizer_hash=corpus.tokenizer.sha256)
    require_tokenizer(record, corpus)
    with pytest.raises(UserError, match=r"another tokenizer than .* \(--tokenizer-model\)"):
        require_tokenizer(record_at(tmp_path), corpus)


def train(trainer, first, last):
    """Optimizer steps ``first`` to ``last`` on made-up gradients that depend on the step."""
    (model,), optimizer, scheduler = trainer
    for step in range(first, last + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        scheduler.step(1)
        optimizer.step()


@pytest.mark.parametrize("sharded", [False, True])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(one_rank, tmp_path, sharded):
    layout = dataclasses.replace(one_rank, use_distributed_optimizer=sharded)

    def trainer(seed):
        model = data_parallel([build_model(SHAPE, layout, seed=seed)], layout, bf16=False)
        optimizer = build_optimizer(model, OPTIONS, layout, bf16=False)
        return model, optimizer, build_scheduler(optimizer, OPTIONS, train_iters=10)

    straight = trainer(seed=1)
    train(straight, 1, 4)
    state = training_state(*straight, is_loading=False)
    save_checkpoint(state, record_at(tmp_path / "step"))
    train(straight, 5, 8)

    resumed = trainer(seed=2)
    load_training(CheckpointRecord.load(tmp_path / "step"), *resumed)
    train(resumed, 5, 8)
    assert resumed[1].param_groups[0]["lr"] == straight[1].param_groups[0]["lr"]
    for name, weight in weights_of(resumed[0][0]).items():
        assert torch.equal(weight, unwrap(straight[0][0]).get_parameter(name)), name


def test_every_parameter_counts_its_own_steps_after_loading(one_rank, tmp_path):
    """As megatron loads it, one step tensor is shared and counts once per parameter."""
    layout = dataclasses.replace(one_rank, use_distributed_optimizer=True)
    model = data_parallel([build_model(SHAPE, layout, seed=1)], layout, bf16=False)
    optimizer = build_optimizer(model, OPTIONS, layout, bf16=False)
    scheduler = build_scheduler(optimizer, OPTIONS, train_iters=10)
    train((model, optimizer, scheduler), 1, 2)
    state = training_state(model, optimizer, scheduler, is_loading=False)
    save_checkpoint(state, record_at(tmp_path / "step"))
    load_training(CheckpointRecord.load(tmp_path / "step"), model, optimizer, scheduler)
    train((model, optimizer, scheduler), 3, 5)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    steps = [state["step"] for part in parts for state in part.optimizer.state.values()]
    assert len({id(step) for step in steps}) == len(steps) == len(list(model[0].parameters()))
    assert [float(step) for step in steps] == [5.0] * len(steps)


def test_other_optimizers_are_not_touched(one_rank):
    model = data_parallel([build_model(SHAPE, one_rank, seed=1)], one_rank, bf16=False)
    optimizer = build_optimizer(model, OPTIONS, one_rank, bf16=False)
    prepare_for_loading(optimizer)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    assert all(not part.optimizer.state for part in parts)
