"""Hugging Face folders to checkpoints and back; layouts are in tests/distributed."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import resource
import runpy
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint.convert import convert_from_huggingface, convert_to_huggingface
from megatron_chameleon.checkpoint.huggingface_folder import read_tensors
from megatron_chameleon.checkpoint.load import open_reader, shape_of
from megatron_chameleon.checkpoint.options import FromHuggingFaceOptions, ToHuggingFaceOptions
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from tests.rounding import assert_as_near
from tests.unit.checkpoint.samples import (
    POSITIONS,
    VOCAB_SIZE,
    WEIGHTS,
    PickledCode,
    record_at,
    same_tensors,
    tensors_in,
)
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


def test_a_converted_checkpoint_computes_like_transformers(made, converted):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made)
    reference = logits_of(theirs)
    assert theirs.config.activation_function == "gelu_new"
    assert reference.std() > 0.1
    assert_as_near(logits_of(converted), reference, logits_of(theirs.double()))
    assert shape_of(converted) == ModelShape(
        ModelSize(2, 3, 150, 600), VOCAB_SIZE, POSITIONS, "gelu_tanh"
    )
    assert converted.step == converted.samples == 0
    assert converted.tokenizer_hash == load_tokenizer(made, EOD).identity.sha256
    converted.verify()


def test_there_and_back_by_the_tool_is_bit_equal(made, tmp_path, converted, monkeypatch, capsys):
    def tool(*arguments):
        monkeypatch.setattr(sys, "argv", ["tools/convert_checkpoint.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(str(ROOT / "tools" / "convert_checkpoint.py"), run_name="__main__")
        return exit_.value.code

    ours, theirs, again = (tmp_path / name for name in ("ours", "theirs", "again"))
    assert tool("from-huggingface", "--model", made, "--output", ours) == 0
    assert tool("to-huggingface", "--checkpoint", ours, "--output", theirs) == 0
    assert tool("from-huggingface", "--model", theirs, "--output", again) == 0
    assert same_tensors(tensors_in(theirs), tensors_in(made))
    assert (theirs / "tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    assert {CheckpointRecord.load(each).hash for each in (ours, again)} == {converted.hash}
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in theirs.iterdir()}
    assert len(set(modes.values())) == 1, modes
    assert capsys.readouterr().err == ""
    assert tool("to-huggingface", "--checkpoint", ours, "--output", theirs) == 2
    assert capsys.readouterr().err.startswith(f"error: --output {theirs} ")


def test_weights_are_rounded_and_sharded(exported, made, tmp_path):
    folder = exported(dtype="bfloat16", max_shard_size="500KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    expected = {name: t.to(torch.bfloat16) for name, t in tensors_in(made).items()}
    assert same_tensors(tensors_in(folder), expected)
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    convert_from_huggingface(FromHuggingFaceOptions(folder, tmp_path / "again"))
    for size in ("many", "0.0MB"):
        with pytest.raises(UserError, match=f"--max-shard-size {size}"):
            exported(max_shard_size=size)


def test_a_pickle_is_read_only_with_allow_pickle_and_runs_no_code(folder, tmp_path, converted):
    output, path, ran = tmp_path / "checkpoint", folder / "pytorch_model.bin", tmp_path / "ran"
    torch.save(tensors_in(folder), path)
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"pytorch_model\.bin.* --allow-pickle"):
        convert_from_huggingface(FromHuggingFaceOptions(folder, output))
    assert not output.exists()
    options = FromHuggingFaceOptions(folder, output, allow_pickle=True, overwrite=True)
    convert_from_huggingface(options)
    assert CheckpointRecord.load(output).hash == converted.hash
    content = {"transformer.wte.weight": PickledCode(ran), "of_some_size": torch.zeros(10**6)}
    torch.save(content, path)
    torch.load(path, weights_only=False)
    ran.rmdir()
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        convert_from_huggingface(options)
    assert not ran.exists()
    assert CheckpointRecord.load(output).hash == converted.hash


@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_pickle_is_a_user_error(tmp_path, zipped):
    path, rng = tmp_path / "pytorch_model.bin", random.Random(0)
    tensors = {"a": torch.ones(4, 3), "b": torch.arange(5)}
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    whole, rejected = path.read_bytes(), 0
    # Of a zip, most bytes are padding: the pickle is near the beginning.
    size = whole.index(b"byteorder") if zipped else len(whole)
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.randrange(size)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            read_tensors([path])
        except UserError:
            rejected += 1
    assert rejected > 20


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def drop_tensor(folder, name):
    save_file({n: t for n, t in tensors_in(folder).items() if n != name}, folder / WEIGHTS)


def write_index(folder, shard):
    (folder / WEIGHTS).rename(folder / f"{WEIGHTS}.index.json")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json:1"),
    "other model": (lambda f: change_config(f, model_type="opt"), "model_type"),
    "many layers": (lambda f: change_config(f, n_layer=10**9), "parameters"),
    "damaged": (lambda f: (f / WEIGHTS).write_bytes(b"x" * 10**7), r"model\.safetensors"),
    "cut short": (lambda f: (f / WEIGHTS).write_bytes(b"x" * 99), "99 bytes"),
    "no tensor": (lambda f: drop_tensor(f, "transformer.ln_f.bias"), "ln_f"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    "shards gone": (lambda f: write_index(f, "gone.safetensors"), r"gone\.safetensors"),
    "shards elsewhere": (lambda f: write_index(f, "../gpt2/gone.safetensors"), "weight_map"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_invalid_folder_is_rejected_and_nothing_written(folder, tmp_path, fault):
    damage, named = FAULTS[fault]
    damage(folder)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=rf"^[^\n]*{named}[^\n]*$"):
        convert_from_huggingface(FromHuggingFaceOptions(folder, tmp_path / "checkpoint"))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("marker", ["config.json", "checkpoint.json"])
def test_existing_output_is_kept_unless_it_can_be_replaced(made, converted, tmp_path, marker):
    output = tmp_path / "out"

    def convert(*, overwrite):
        if marker == "config.json":
            convert_to_huggingface(
                ToHuggingFaceOptions(converted.root, output, overwrite=overwrite)
            )
        else:
            convert_from_huggingface(FromHuggingFaceOptions(made, output, overwrite=overwrite))

    output.write_text("a file")
    with pytest.raises(UserError, match="--output"):
        convert(overwrite=True)
    output.unlink()
    output.mkdir()
    (output / "notes.txt").touch()
    with pytest.raises(UserError, match=re.escape(marker)):
        convert(overwrite=True)
    (output / marker).write_text("of before")
    with pytest.raises(UserError, match="--overwrite"):
        convert(overwrite=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file that may not grow fails like one on a full disk: in the middle of a write.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match=str(output)):
            convert(overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name for path in output.iterdir()} == {"notes.txt", marker}
    convert(overwrite=True)
    assert not (output / "notes.txt").exists()
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(("value", "dtype"), [(torch.nan, "float32"), (1e5, "float16")])
def test_weights_that_dtype_cannot_represent_are_rejected_by_name(tmp_path, made, value, dtype):
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
    with pytest.raises(UserError, match=r"transformer\.ln_f\.bias"):
        convert_to_huggingface(options)
    assert not (tmp_path / "out").exists()
