"""Folders of transformers to checkpoints and back, on disk. Layouts are in tests/distributed."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import resource
import runpy
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.artifacts.checkpoint import FILE_NAME
from megatron_chameleon.checkpoint.convert import convert_from_huggingface, convert_to_huggingface
from megatron_chameleon.checkpoint.huggingface_folder import read_tensors
from megatron_chameleon.checkpoint.load import open_reader, shape_of
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.options.convert import FromHuggingFaceOptions, ToHuggingFaceOptions
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.parallel.layout import distributed
from tests.rounding import assert_as_near
from tests.unit.checkpoint.gpt2_samples import (
    POSITIONS,
    VOCAB_SIZE,
    WEIGHTS,
    same_tensors,
    tensors_in,
)
from tests.unit.checkpoint.pickled_code import PickledCode
from tests.unit.checkpoint.test_checkpoint_round_trip import record_at
from tests.unit.corpus.tokenizer_samples import EOD

ROOT = Path(__file__).resolve().parents[3]


def logits_of(model):
    """Logits [b, s, v] of random tokens, by transformers' model or by a record's."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (2, POSITIONS), generator=generator)
    with torch.no_grad():
        if isinstance(model, transformers.GPT2LMHeadModel):
            return model(tokens).logits
        with distributed(ParallelOptions(), seed=0) as layout:
            gpt = open_reader(model, layout).model
            positions = torch.arange(POSITIONS).expand_as(tokens)
            return gpt(tokens, positions, None)[..., :VOCAB_SIZE]


def test_a_checkpoint_of_a_folder_computes_what_transformers_does(made, converted):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made)
    reference = logits_of(theirs)
    assert theirs.config.activation_function == "gelu_new"
    assert reference.std() > 0.1
    assert_as_near(logits_of(converted), reference, logits_of(theirs.double()))


def test_a_converted_checkpoint_says_what_it_is(made, converted):
    assert shape_of(converted) == ModelShape(
        ModelSize(2, 3, 150, 600), VOCAB_SIZE, POSITIONS, "gelu_tanh"
    )
    assert converted.step == converted.samples == 0
    assert converted.tokenizer_hash == load_tokenizer(made, EOD).identity.sha256
    converted.verify()


def test_transformers_opens_what_is_written(exported, converted, capsys):
    folder = exported()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert_as_near(logits_of(converted), logits_of(model), logits_of(model.double()))
    printed = capsys.readouterr().out
    assert f"written to {folder} in float32, with its tokenizer.json" in printed


def test_there_and_back_is_bit_equal(exported, made, tmp_path, converted):
    folder = exported()
    assert same_tensors(tensors_in(folder), tensors_in(made))
    assert (folder / "tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    convert_from_huggingface(FromHuggingFaceOptions(folder, tmp_path / "again"))
    assert CheckpointRecord.load(tmp_path / "again").hash == converted.hash


def test_files_can_be_read_by_whom_the_user_lets(exported):
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in exported().iterdir()}
    assert len(set(modes.values())) == 1, modes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_to_the_type_that_is_asked_for(exported, made, dtype):
    folder = exported(dtype=dtype)
    expected = {name: t.to(getattr(torch, dtype)) for name, t in tensors_in(made).items()}
    assert same_tensors(tensors_in(folder), expected)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == getattr(torch, dtype)


def test_large_weights_are_cut_into_files(exported, made, tmp_path):
    folder = exported(max_shard_size="500KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert same_tensors(tensors_in(folder), tensors_in(made))
    assert same_tensors(
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict(),
        transformers.AutoModelForCausalLM.from_pretrained(made).state_dict(),
    )
    convert_from_huggingface(FromHuggingFaceOptions(folder, tmp_path / "again"))


def test_weights_in_half_precision_are_read_exactly(folder, exported, tmp_path):
    halved = {name: tensor.half() for name, tensor in tensors_in(folder).items()}
    save_file(halved, folder / WEIGHTS, metadata={"format": "pt"})
    convert_from_huggingface(FromHuggingFaceOptions(folder, tmp_path / "half"))
    options = ToHuggingFaceOptions(tmp_path / "half", tmp_path / "back", dtype="float16")
    convert_to_huggingface(options)
    assert same_tensors(tensors_in(tmp_path / "back"), halved)


@pytest.fixture
def pickled(folder):
    """The same folder with its weights in torch's own format alone."""
    torch.save(tensors_in(folder), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    return folder


def test_a_pickle_is_read_only_where_that_is_asked_for(pickled, tmp_path, converted):
    output = tmp_path / "checkpoint"
    with pytest.raises(UserError, match=r"pytorch_model\.bin.* --allow-pickle"):
        convert_from_huggingface(FromHuggingFaceOptions(pickled, output))
    assert not output.exists()
    convert_from_huggingface(FromHuggingFaceOptions(pickled, output, allow_pickle=True))
    assert CheckpointRecord.load(output).hash == converted.hash


def test_code_in_a_pickle_is_not_run_even_then(pickled, tmp_path):
    ran = tmp_path / "ran"
    content = {"transformer.wte.weight": PickledCode(ran), "of_some_size": torch.zeros(10**6)}
    torch.save(content, pickled / "pytorch_model.bin")
    torch.load(pickled / "pytorch_model.bin", weights_only=False)
    assert ran.exists()
    ran.rmdir()
    options = FromHuggingFaceOptions(pickled, tmp_path / "checkpoint", allow_pickle=True)
    with pytest.raises(UserError, match=r"cannot read .*pytorch_model\.bin \(.*it is damaged"):
        convert_from_huggingface(options)
    assert not ran.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_pickle_is_a_user_error_whatever_torch_raises(tmp_path, zipped):
    path, rng = tmp_path / "pytorch_model.bin", random.Random(0)
    tensors = {"a": torch.ones(4, 3), "b": torch.arange(5)}
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    whole, rejected = path.read_bytes(), 0
    # Of a zip, most bytes are padding: the pickle is near the beginning.
    size = whole.index(b"byteorder") if zipped else len(whole)
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[rng.randrange(size)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            read_tensors([path])
        except UserError:
            rejected += 1
    assert rejected > 50


def test_safetensors_are_preferred_to_a_pickle_beside_them(folder, tmp_path, converted):
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    options = FromHuggingFaceOptions(folder, tmp_path / "checkpoint", allow_pickle=True)
    convert_from_huggingface(options)
    assert CheckpointRecord.load(tmp_path / "checkpoint").hash == converted.hash


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def change_tensors(folder, **changes):
    tensors = tensors_in(folder) | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / WEIGHTS)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "config.json does not exist; give a Hugging Face model's"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json:1: not JSON"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "JSON object is expected"),
    "other model": (lambda f: change_config(f, model_type="opt"), "field model_type 'opt'"),
    "other width": (lambda f: change_config(f, n_inner=500), r"is \[150, 600\], .* \[150, 500\]"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "holds no weights: it has no model.safe"),
    "damaged": (lambda f: (f / WEIGHTS).write_bytes(b"x" * 10**7), r"cannot read .*model\.safete"),
    "cut short": (lambda f: (f / WEIGHTS).write_bytes(b"x" * 99), r"config\.json: .* 99 bytes"),
    "many layers": (lambda f: change_config(f, n_layer=10**9), r"config\.json: .* parameters do"),
    "many tokens": (lambda f: change_config(f, vocab_size=10**12), r"config\.json: .* parameters"),
    "a string": (lambda f: change_config(f, n_layer="2"), "field n_layer"),
    "missing": (lambda f: change_tensors(f, **{"transformer.ln_f.bias": None}), "no tensor tran"),
    "extra": (lambda f: change_tensors(f, score=torch.ones(2)), "score for one"),
    "not finite": (
        lambda f: change_tensors(f, **{"transformer.ln_f.bias": torch.full((150,), torch.nan)}),
        "ln_f.bias holds numbers that are not finite",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "holds no tokenizer"),
    "shards gone": (
        lambda f: (
            (f / WEIGHTS)
            .rename(f / f"{WEIGHTS}.index.json")
            .write_text('{"weight_map": {"a": "gone.safetensors"}}')
        ),
        r"gone\.safetensors is missing",
    ),
    "shards elsewhere": (
        lambda f: (
            (f / WEIGHTS)
            .rename(f / f"{WEIGHTS}.index.json")
            .write_text('{"weight_map": {"a": "../gpt2/gone.safetensors"}}')
        ),
        "field weight_map: ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_is_no_whole_gpt2_is_refused_and_nothing_written(folder, tmp_path, fault):
    spoil, told = FAULTS[fault]
    spoil(folder)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=told) as refused:
        convert_from_huggingface(FromHuggingFaceOptions(folder, tmp_path / "checkpoint"))
    assert "\n" not in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before


def test_a_model_whose_replacement_was_killed_is_not_replaced_unasked(converted, made, tmp_path):
    output = tmp_path / "out"
    back = FromHuggingFaceOptions(made, output)
    to = ToHuggingFaceOptions(converted.root, output)
    for convert in (lambda: convert_from_huggingface(back), lambda: convert_to_huggingface(to)):
        convert()
        output.rename(tmp_path / ".out.replaced")
        with pytest.raises(UserError, match="--overwrite"):
            convert()
        shutil.rmtree(output)
        assert not list(tmp_path.iterdir())


def overwriting(made, converted, output):
    """Conversions to and from Hugging Face that replace what ``output`` holds."""
    to = ToHuggingFaceOptions(converted.root, output, overwrite=True)
    back = FromHuggingFaceOptions(made, output, overwrite=True)
    return {
        "to": lambda: convert_to_huggingface(to),
        "from": lambda: convert_from_huggingface(back),
    }


@pytest.mark.parametrize("command", ["to", "from"])
def test_a_replacement_that_fails_leaves_what_was_there(
    made, converted, tmp_path, monkeypatch, command
):
    output = tmp_path / "out"
    convert = overwriting(made, converted, output)[command]
    convert()
    (output / "mine").write_text("of before")
    real = os.replace

    def refuse(source, target):
        if Path(target) == output and Path(source).name.endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match=f"cannot write .*{output}.*Input/output error"):
        convert()
    assert list(tmp_path.iterdir()) == [output]
    assert (output / "mine").exists()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda p: p.write_text("a file"), "is not a folder"),
        (lambda p: (p.mkdir(), (p / "notes.txt").touch()), "holds other files and no config.json"),
        (lambda p: (p.mkdir(), (p / "config.json").touch()), "already .* --overwrite to"),
    ],
)
def test_what_is_there_is_not_replaced_unasked(converted, tmp_path, spoil, told):
    output = tmp_path / "out"
    spoil(output)
    with pytest.raises(UserError, match=told):
        convert_to_huggingface(ToHuggingFaceOptions(converted.root, output))
    if "overwrite" in told:
        options = ToHuggingFaceOptions(converted.root, output, overwrite=True)
        convert_to_huggingface(options)
        assert (output / WEIGHTS).exists()
    assert list(tmp_path.iterdir()) == [output]


def test_a_checkpoint_is_not_replaced_unasked(made, converted, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / FILE_NAME).write_text("of before")
    with pytest.raises(UserError, match=r"checkpoint\.json.* --overwrite"):
        convert_from_huggingface(FromHuggingFaceOptions(made, output))
    assert (output / FILE_NAME).read_text() == "of before"
    convert_from_huggingface(FromHuggingFaceOptions(made, output, overwrite=True))
    assert CheckpointRecord.load(output).hash == converted.hash


@pytest.mark.parametrize("command", ["to", "from"])
def test_a_full_disk_leaves_what_was_there(made, converted, tmp_path, command):
    output = tmp_path / "out"
    marker = "config.json" if command == "to" else FILE_NAME
    output.mkdir()
    (output / marker).write_text("of before")
    convert = overwriting(made, converted, output)[command]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file that may not grow fails as one on a full disk does: in the middle of a write.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match=f"cannot write .*{output} .*free space or "):
            convert()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [output]
    assert [path.name for path in output.iterdir()] == [marker]


@pytest.mark.parametrize(
    ("value", "dtype", "told"),
    [(torch.nan, "float32", "has diverged"), (1e5, "float16", r"up to 100000, too large for .*16")],
)
def test_weights_that_cannot_be_written_are_refused_by_name(tmp_path, made, value, dtype, told):
    shape = ModelShape(ModelSize(1, 2, 16, 32), VOCAB_SIZE, 8)
    record = record_at(tmp_path / "step", shape)
    tokenizer = made / "tokenizer.json"
    record = dataclasses.replace(record, tokenizer_hash=load_tokenizer(tokenizer, EOD).sha256)
    with distributed(ParallelOptions(), seed=0) as layout:
        model = build_model(shape, layout, seed=0)
        with torch.no_grad():
            model.decoder.final_layernorm.bias[3] = value
        save_checkpoint(model_state([model]), record)
    options = ToHuggingFaceOptions(
        record.root, tmp_path / "out", dtype=dtype, tokenizer_model=tokenizer
    )
    with pytest.raises(UserError, match=f"tensor transformer.ln_f.bias .*{told}"):
        convert_to_huggingface(options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["many", "-5GB", " 0 KB", "0.0MB", "nanGB", "infGB", "5"])
def test_a_size_that_is_none_is_refused(converted, exported, size):
    with pytest.raises(UserError, match=rf"--max-shard-size {size}: .* such as 5GB"):
        exported(max_shard_size=size)


def test_the_tool_converts_both_ways(made, tmp_path, monkeypatch, capsys):
    def tool(*arguments):
        monkeypatch.setattr(sys, "argv", ["tools/convert_checkpoint.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(ROOT / "tools" / "convert_checkpoint.py"), run_name="__main__")
        return left.value.code

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert tool("from-huggingface", "--model", made, "--output", ours) == 0
    assert tool("to-huggingface", "--checkpoint", ours, "--output", theirs) == 0
    assert same_tensors(tensors_in(theirs), tensors_in(made))
    assert capsys.readouterr().err == ""
    assert tool("to-huggingface", "--checkpoint", ours, "--output", theirs) == 2
    assert capsys.readouterr().err.startswith(f"error: --output {theirs} ")
