"""A checkpoint's files contain tensors and records, and run no code."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle

import pytest
import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.artifacts.checkpoint import hash_files
from megatron_chameleon.checkpoint.index import INDEX_NAME, read_index
from megatron_chameleon.checkpoint.load import load_training, open_reader
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state, training_state
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model
from tests.unit.checkpoint.samples import (
    SHAPE,
    PickledCode,
    record_at,
    train,
    trainer_of,
)


@pytest.fixture
def record(one_rank, tmp_path):
    model = build_model(SHAPE, one_rank, seed=5)
    save_checkpoint(model_state([model]), record_at(tmp_path / "step"))
    return CheckpointRecord.load(tmp_path / "step")


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
    """torch unpickles bytes without restriction; with a size, megatron accepts them."""
    entry = BytesStorageMetadata()
    vars(entry)["size"] = torch.Size([128, SHAPE.size.hidden_size])
    replace_tensor(record, code, entry)


@pytest.mark.parametrize(
    ("craft", "problem", "runs_in_torch"),
    [
        (
            lambda record, code: (record.root / INDEX_NAME).write_bytes(pickle.dumps([code])),
            r"\.metadata .*mkdir",
            True,
        ),
        (
            lambda record, code: torch.save({"scheduler": code}, record.root / "common.pt"),
            r"common\.pt .*mkdir",
            False,
        ),
        (replace_tensor, r"posix\.mkdir", False),
        (declare_bytes, rf"\.metadata .*{NAME} is not a tensor", True),
    ],
    ids=["index", "common state", "tensor", "bytes"],
)
def test_code_in_a_file_is_not_run(one_rank, record, tmp_path, craft, problem, runs_in_torch):
    trace = tmp_path / "ran"
    craft(record, PickledCode(trace))
    record = dataclasses.replace(record, files=hash_files(record.root))
    with pytest.raises(UserError, match=problem) as error:
        open_reader(record, one_rank)
    assert "weights_only" not in str(error.value)  # torch's advice is to run it
    assert not trace.exists()
    if runs_in_torch:
        model = model_state([build_model(SHAPE, one_rank, seed=0)])["model0"]
        wanted = {"model0": {n: v for n, v in model.items() if "_extra_state" not in n}}
        with contextlib.suppress(Exception, CheckpointException):
            dist_checkpointing.load(wanted, str(record.root))
        assert trace.exists()


@pytest.mark.parametrize("name", [INDEX_NAME, "common.pt", "__0_0.distcp"])
@pytest.mark.parametrize("content", [None, b"", b"\x80\x04", b"no pickle", pickle.dumps([1])])
def test_a_missing_or_damaged_file_is_an_error(one_rank, record, name, content):
    (record.root / name).unlink()
    if content is not None:
        (record.root / name).write_bytes(content)
    with pytest.raises(UserError, match=r"^[^\n]*step[^\n]*use another checkpoint$"):
        open_reader(record, one_rank)


@pytest.mark.parametrize(
    "crafted",
    [
        {},
        {"optimizer": 3},
        {"model0": {"decoder": 3}},
        {"scheduler": 5},
        {"optimizer": [], "random": 3},
    ],
)
def test_common_state_of_another_structure_is_an_error(one_rank, tmp_path, crafted):
    trainer = trainer_of(one_rank)
    train(trainer, 1, 2)
    save_checkpoint(training_state(*trainer, is_loading=False), record_at(tmp_path))
    record = CheckpointRecord.load(tmp_path)
    kept = torch.load(tmp_path / "common.pt", weights_only=True)
    replaced = crafted if not crafted or crafted.get("scheduler") == 5 else {**kept, **crafted}
    torch.save(replaced, tmp_path / "common.pt")
    with pytest.raises(UserError, match=r"^[^\n]*use another checkpoint$"):
        load_training(record, *trainer)


METADATA = b"ctorch.distributed.checkpoint.metadata\n"
FILLED = METADATA + b"BytesStorageMetadata\n)\x81}X\x04\x00\x00\x00sizeK\x01sb"


@pytest.mark.parametrize(
    ("opcodes", "problem"),
    [
        (METADATA + b"Metadata\n}b.", "it changes a type"),
        (METADATA + b"_MEM_FORMAT_ENCODING\n}b.", "it changes a EnumType"),
        (b"ctorch\nSize\n}b.", "it changes a type"),
        (b"ctorch.serialization\n_get_layout\n}}\x86b.", "it changes a function"),
        (b"ctorch\nfloat32\n}}\x86b.", "it changes a dtype"),
        (FILLED + b"}b.", "it changes a BytesStorageMetadata"),  # filled twice
        (METADATA + b"BytesStorageMetadata\n)\x81N}\x86b.", "does not have"),  # by slots
        (
            METADATA + b"BytesStorageMetadata\n)\x81}X\x0c\x00\x00\x00__setstate__K\x01sb.",
            "does not have",
        ),
        (b"ctorch\nload\n.", "it references torch.load"),
    ],
)
def test_a_pickle_can_only_fill_new_records(tmp_path, opcodes, problem):
    (tmp_path / INDEX_NAME).write_bytes(b"\x80\x02" + opcodes)
    with pytest.raises(UserError, match=problem):
        read_index(tmp_path)


def test_torch_only_loads_weights_and_the_index_is_read_once(one_rank, tmp_path, monkeypatch):
    trainer = trainer_of(one_rank)
    train(trainer, 1, 1)
    save_checkpoint(training_state(*trainer, is_loading=False), record_at(tmp_path / "step"))
    weights_only = []
    real = torch.load

    def recorded(*arguments, **options):
        weights_only.append(options.get("weights_only", True))
        return real(*arguments, **options)

    def read_and_remove(folder):
        index = read_index(folder)
        (folder / INDEX_NAME).unlink()
        return index

    monkeypatch.setattr(torch, "load", recorded)
    monkeypatch.setattr("megatron_chameleon.checkpoint.load.read_index", read_and_remove)
    record = CheckpointRecord.load(tmp_path / "step")
    load_training(record, *trainer)
    assert len(weights_only) > 10
    assert all(weights_only)
