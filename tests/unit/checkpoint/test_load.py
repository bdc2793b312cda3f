"""Save and load checkpoints on one rank; read files that are damaged or contain code."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import pickle
import re
from pathlib import Path

import psutil
import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.artifacts.checkpoint import hash_files
from megatron_chameleon.checkpoint import load, save
from megatron_chameleon.checkpoint.index import INDEX_NAME, read_index
from megatron_chameleon.checkpoint.load import load_training
from megatron_chameleon.checkpoint.open_model import CheckpointModel
from megatron_chameleon.checkpoint.save import Handover, save_checkpoint
from megatron_chameleon.checkpoint.state import model_state, training_state
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model, unwrap
from tests.unit.checkpoint.samples import SHAPE, PickledCode, record_at, saved, train, trainer_of


def raising(error):
    """Return a function that raises ``error``."""

    def function(*_arguments, **_options):
        raise error

    return function


def weights_of(model):
    return {name: p.detach().clone() for name, p in unwrap(model).named_parameters()}


@pytest.fixture
def record(one_rank, tmp_path):
    """Record of a checkpoint on disk."""
    model = build_model(SHAPE, one_rank, seed=5)
    return saved(model_state([model]), tmp_path / "step")


@pytest.mark.parametrize("bf16", [False, True])
def test_a_reader_loads_the_saved_weights_in_fp32(one_rank, tmp_path, bf16):
    processes = psutil.Process().children(recursive=True)
    model = build_model(SHAPE, one_rank, seed=5, bf16=bf16)
    record = saved(model_state([model]), tmp_path / "step")
    # megatron would start a server process for results, which outlives a killed rank.
    assert psutil.Process().children(recursive=True) == processes
    assert set(record.files) == {p.name for p in record.root.iterdir()} - {"checkpoint.json"}
    record.verify()
    reader = CheckpointModel(record).reader(one_rank)
    assert reader.config == SHAPE
    assert not reader.model.training
    for name, weight in weights_of(model).items():
        read = reader.model.get_parameter(name)
        assert read.dtype == torch.float32, name
        assert torch.equal(read, weight.float()), name


def test_a_killed_save_leaves_no_checkpoint_and_the_next_one_cleans_up(
    one_rank, tmp_path, monkeypatch
):
    model, record = build_model(SHAPE, one_rank, seed=5), record_at(tmp_path / "step")
    with monkeypatch.context() as patched:
        patched.setattr(save, "hash_files", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(model_state([model]), record)
    (left,) = (path.name for path in tmp_path.iterdir())
    assert re.fullmatch(r"\.step\.\w{8}\.tmp", left)
    save_checkpoint(model_state([model]), record)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    CheckpointRecord.load(record.root).verify()


def test_a_save_replaces_the_old_checkpoint_completely_or_not_at_all(one_rank, record, monkeypatch):
    (record.root / "left over").write_text("of before")
    real = os.replace

    def fail(source, target):
        if Path(target) == record.root and Path(source).name.endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    model = build_model(SHAPE, one_rank, seed=6)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(UserError, match="Input/output error"):
            save_checkpoint(model_state([model]), record)
    assert [path.name for path in record.root.parent.iterdir()] == ["step"]
    found = CheckpointRecord.load(record.root)
    found.verify()
    assert found.hash == record.hash
    save_checkpoint(model_state([model]), record)
    assert not (record.root / "left over").exists()
    read = weights_of(CheckpointModel(CheckpointRecord.load(record.root)).reader(one_rank).model)
    assert all(torch.equal(read[name], weight) for name, weight in weights_of(model).items())


def test_a_checkpoint_of_another_shape_is_rejected(one_rank, record):
    shape = dataclasses.asdict(SHAPE)
    for change, problem in (
        ({"vocab_size": "many"}, r"/checkpoint\.json: field model"),
        # A model with so many tokens would be larger than the files.
        ({"vocab_size": 10**12}, r"/checkpoint\.json: field model"),
        ({"num_layers": 3}, "use another checkpoint"),
        ({"num_query_groups": 3}, r"/checkpoint\.json: field model"),
    ):
        other = dataclasses.replace(record, model=shape | change)
        with pytest.raises(UserError, match=problem):
            CheckpointModel(other).reader(one_rank)


def test_a_file_missing_from_the_record_is_not_read(one_rank, record):
    for name in record.files:
        files = {other: file for other, file in record.files.items() if other != name}
        dataclasses.replace(record, files=files).save()
        with pytest.raises(UserError, match=f"field files: {re.escape(name)} "):
            CheckpointRecord.load(record.root)
        if name.endswith(".distcp"):
            with pytest.raises(UserError, match=f"{name}.* is not listed"):
                CheckpointModel(dataclasses.replace(record, files=files)).reader(one_rank)


def sample():
    """Return the next numbers of the default generator and of megatron's tensor-parallel
    generator."""
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
    record = saved(training_state(*straight, is_loading=False), tmp_path / "step")
    expected = sample()
    assert not torch.equal(sample(), expected)
    train(straight, 5, 8)

    resumed = trainer_of(layout, seed=2)
    load_training(record, *resumed)
    assert torch.equal(sample(), expected)
    train(resumed, 5, 8)
    assert resumed[1].param_groups[0]["lr"] == straight[1].param_groups[0]["lr"]
    for name, weight in weights_of(resumed[0][0]).items():
        assert torch.equal(weight, unwrap(straight[0][0]).get_parameter(name)), name
    if sharded:  # megatron would share one step tensor, and increment it once per parameter
        parts = getattr(resumed[1], "chained_optimizers", [resumed[1]])
        steps = [state["step"] for part in parts for state in part.optimizer.state.values()]
        assert len({id(step) for step in steps}) == len(steps)
        assert [float(step) for step in steps] == [8.0] * len(steps)


def test_a_value_larger_than_a_pipe_is_read_after_the_writing_process_has_ended():
    handover, value = Handover(), list(range(1_000_000))
    process = multiprocessing.get_context("fork").Process(target=handover.put, args=(value,))
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert handover.get() == value


def test_a_rank_without_memory_for_its_result_still_joins_the_collective(
    one_rank, tmp_path, monkeypatch
):
    """An error before the collective would leave the other ranks waiting."""
    state = model_state([build_model(SHAPE, one_rank, seed=5)])
    monkeypatch.setattr(pickle, "dump", raising(MemoryError()))
    with pytest.raises(UserError, match=r"rank 0: .* memory did not suffice"):
        save_checkpoint(state, record_at(tmp_path / "step"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_while_reading_is_not_reported_as_damage(one_rank, record, monkeypatch, error):
    """torch collects every exception of a read, even an interrupt, in a CheckpointException."""
    monkeypatch.setattr(FileSystemReader, "read_data", raising(error))
    with pytest.raises(error):
        CheckpointModel(record).reader(one_rank)


NAME = "embedding.word_embeddings.weight"


def replace_tensor(record, content, entry=None):
    """Make the index locate a tensor in a new file with ``content``."""
    torch.save(content, record.root / "__9_0.distcp")
    with (record.root / INDEX_NAME).open("rb") as stream:
        index = pickle.load(stream)
    size = (record.root / "__9_0.distcp").stat().st_size
    (place,) = (place for place in index.storage_data if place.fqn == NAME)
    stored = index.storage_data.pop(place)
    if entry is not None:
        index.state_dict_metadata[NAME] = entry
        place = dataclasses.replace(place, offset=None, index=None)
    index.storage_data[place] = dataclasses.replace(
        stored, relative_path="__9_0.distcp", offset=0, length=size
    )
    (record.root / INDEX_NAME).write_bytes(pickle.dumps(index))


def declare_bytes(record, code):
    """Declare a tensor in the index as bytes, which torch would unpickle without restriction.

    The entry has a size, since megatron does not accept byte entries without a size.
    """
    entry = BytesStorageMetadata()
    vars(entry)["size"] = torch.Size([128, SHAPE.hidden_size])
    replace_tensor(record, code, entry)


@pytest.mark.parametrize(
    ("craft", "problem"),
    [
        (
            lambda record, code: (record.root / INDEX_NAME).write_bytes(pickle.dumps([code])),
            r"\.metadata .*mkdir",
        ),
        (replace_tensor, r"posix\.mkdir"),
        (declare_bytes, rf"{NAME} is not a tensor"),
    ],
    ids=["index", "tensor", "bytes"],
)
def test_code_in_a_file_is_not_run(one_rank, tmp_path, craft, problem):
    trace, trainer = tmp_path / "ran", trainer_of(one_rank)
    train(trainer, 1, 1)
    record = saved(training_state(*trainer, is_loading=False), tmp_path / "step")
    craft(record, PickledCode(trace))
    record = dataclasses.replace(record, files=hash_files(record.root))
    for read in (
        lambda: CheckpointModel(record).reader(one_rank),
        lambda: load_training(record, *trainer),
    ):
        with pytest.raises(UserError, match=problem) as error:
            read()
        assert "weights_only" not in str(error.value)  # torch's message advises to allow the code
        assert not trace.exists()


def test_torch_does_not_unpickle_the_index_again(one_rank, tmp_path, monkeypatch):
    """torch would do so without restriction, after the restricted reading has found no code."""
    trace, trainer = tmp_path / "ran", trainer_of(one_rank)
    train(trainer, 1, 2)
    record = saved(training_state(*trainer, is_loading=False), tmp_path / "step")

    def read_and_replace(folder):
        index = read_index(folder)
        (folder / INDEX_NAME).write_bytes(pickle.dumps(PickledCode(trace)))
        return index

    content = (record.root / INDEX_NAME).read_bytes()
    monkeypatch.setattr(load, "read_index", read_and_replace)
    for read in (
        lambda: CheckpointModel(record).reader(one_rank),
        lambda: load_training(record, *trainer),
    ):
        (record.root / INDEX_NAME).write_bytes(content)
        read()
        assert not trace.exists()


def test_damaged_common_state_is_an_error_and_code_in_it_is_not_run(one_rank, record, tmp_path):
    trace, path, trainer = tmp_path / "ran", record.root / "common.pt", trainer_of(one_rank)
    torch.save({"scheduler": PickledCode(trace)}, path)
    with pytest.raises(UserError, match=r"common\.pt .*mkdir"):
        load_training(record, *trainer)
    assert not trace.exists()
    for content in (b"", b"no pickle", pickle.dumps([1]), None):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=r"^[^\n]*common\.pt[^\n]*use another checkpoint$"):
            load_training(record, *trainer)


@pytest.mark.parametrize("name", [INDEX_NAME, "__0_0.distcp"])
def test_a_missing_or_damaged_file_is_an_error(one_rank, record, name):
    for content in (b"", b"no pickle", pickle.dumps([1]), None):
        (record.root / name).unlink()
        if content is not None:
            (record.root / name).write_bytes(content)
        with pytest.raises(UserError, match=r"^[^\n]*step[^\n]*use another checkpoint$"):
            CheckpointModel(record).reader(one_rank)


def test_common_state_of_another_structure_is_an_error(one_rank, tmp_path):
    trainer = trainer_of(one_rank)
    train(trainer, 1, 2)
    record = saved(training_state(*trainer, is_loading=False), tmp_path)
    kept = torch.load(tmp_path / "common.pt", weights_only=True)
    for crafted in ({}, {"optimizer": 3}, {"optimizer": [], "random": 3}):
        torch.save(crafted and kept | crafted, tmp_path / "common.pt")
        with pytest.raises(UserError, match=r"^[^\n]*use another checkpoint$"):
            load_training(record, *trainer)


METADATA = b"ctorch.distributed.checkpoint.metadata\n"
EMPTY = METADATA + b"BytesStorageMetadata\n)\x81"


@pytest.mark.parametrize(
    ("opcodes", "problem"),
    [
        (METADATA + b"Metadata\n}b.", "it changes a type"),
        (b"ctorch.serialization\n_get_layout\n}}\x86b.", "it changes a function"),
        (b"ctorch\nfloat32\n}}\x86b.", "it changes a dtype"),
        (EMPTY + b"}X\x04\x00\x00\x00sizeK\x01sb}b.", "it changes a BytesStorageMetadata"),
        (EMPTY + b"N}\x86b.", "does not have"),  # the pickled state of an object with slots
        (EMPTY + b"}X\x0c\x00\x00\x00__setstate__K\x01sb.", "does not have"),
        (b"ctorch\nload\n.", "it references torch.load"),
    ],
)
def test_a_pickle_can_only_set_the_state_of_new_records(tmp_path, opcodes, problem):
    (tmp_path / INDEX_NAME).write_bytes(b"\x80\x02" + opcodes)
    with pytest.raises(UserError, match=problem):
        read_index(tmp_path)
