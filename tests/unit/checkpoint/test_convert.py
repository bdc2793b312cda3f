"""Convert Hugging Face folders to checkpoints and back; tests/distributed covers parallel
layouts."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import runpy
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from megatron_chameleon.artifacts import CheckpointRecord, provenance
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.convert import (
    convert_to_checkpoint,
    convert_to_huggingface,
)
from megatron_chameleon.checkpoint.huggingface import read_tensors, stored_types
from megatron_chameleon.checkpoint.open_model import CheckpointModel
from megatron_chameleon.checkpoint.options import (
    FromHuggingFaceOptions,
    ToHuggingFaceOptions,
    TokenizerChoice,
)
from megatron_chameleon.corpus.gigatoken import difficult_texts
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.huggingface_config import (
    FoundConfig,
    config_fields,
    read_model_config,
)
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from tests.families import FAMILIES
from tests.full_disk import largest_file_size
from tests.small_corpus import word_tokenizer, write_small_corpus
from tests.unit.checkpoint.samples import PickledCode, change_config
from tests.unit.corpus.tokenizer_samples import EOD, write_tiktoken

TEXTS = [f"the {word} of a text, and {number} more\n" for number, word in enumerate("abcdefgh" * 9)]
ROOT = Path(__file__).resolve().parents[3]
VOCAB_SIZE, POSITIONS = 300, 24
WEIGHTS = "model.safetensors"
CONFIG: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 3,
    "n_embd": 150,
    "n_positions": POSITIONS,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": VOCAB_SIZE - 1,
    "eos_token_id": VOCAB_SIZE - 1,
}


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Folder that transformers wrote, with a tokenizer; tests must not change it."""
    folder = tmp_path_factory.mktemp("made") / "gpt2"
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG)).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(byte_level_bpe(iter(TEXTS), VOCAB_SIZE, EOD))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """Copy of ``made`` that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "gpt2"))


@pytest.fixture(scope="session")
def converted(made, tmp_path_factory):
    """Checkpoint converted from ``made``; tests must not change it."""
    return to_checkpoint(made, tmp_path_factory.mktemp("converted") / "checkpoint")


def to_checkpoint(folder: Path, output: Path, **options: Any) -> CheckpointRecord:
    convert_to_checkpoint(FromHuggingFaceOptions(folder, output, **options))
    return CheckpointRecord.load(output)


def to_folder(checkpoint: Path, output: Path, **options: Any) -> Path:
    convert_to_huggingface(ToHuggingFaceOptions(checkpoint, output, **options))
    return output


def test_a_round_trip_by_the_tool_is_bit_identical(made, tmp_path, converted, monkeypatch, capsys):
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
    converted.verify()
    assert converted.step == converted.samples == 0
    assert CheckpointModel(converted).config == ModelConfig(
        2, 3, 150, 600, VOCAB_SIZE, POSITIONS, activation="gelu_tanh"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    encoder = load_tokenizer(made, EOD)
    assert encoder.sha256 == converted.tokenizer_hash
    assert tokenizer.eos_token_id == encoder.eod_id
    texts = difficult_texts(())
    for text, ids in zip(texts, encoder.encoder.encode_batch(texts), strict=True):
        assert tokenizer(text)["input_ids"] == ids.tolist()
        assert tokenizer.decode(ids) == encoder.decode(ids.tolist())
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in theirs.iterdir()}
    assert len(set(modes.values())) == 1, modes
    assert capsys.readouterr().err == ""
    assert tool("to-huggingface", "--checkpoint", ours, "--output", theirs) == 2
    assert capsys.readouterr().err.startswith(f"error: --output {theirs} ")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_round_trips_with_the_logits_of_transformers(name, tmp_path):
    config = dataclasses.replace(FAMILIES[name], vocab_size=VOCAB_SIZE)
    folder, fields = tmp_path / name, config_fields(config, "float32", 0)
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(**{**fields, "initializer_range": 0.1})
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(byte_level_bpe(iter(TEXTS), VOCAB_SIZE, EOD))
    record = to_checkpoint(folder, tmp_path / "checkpoint")
    back = to_folder(record.root, tmp_path / "back")
    assert CheckpointModel(record).config == config
    assert same_tensors(tensors_in(back), tensors_in(folder))
    assert read_model_config(back) == FoundConfig(config, 0.0)
    assert json.loads((back / "config.json").read_text()) == fields
    assert to_checkpoint(back, tmp_path / "again").hash == record.hash
    tokens = torch.randint(VOCAB_SIZE, (2, config.max_sequence_length))
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    with distributed(ParallelOptions(), seed=0) as layout, torch.no_grad():
        reader = CheckpointModel(record).reader(layout)
        ours = reader.model(tokens, positions, None)[..., :VOCAB_SIZE]
        theirs = transformers.AutoModelForCausalLM.from_pretrained(back).eval()(tokens).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_weights_are_rounded_and_sharded(converted, made, tmp_path):
    options = {"dtype": "bfloat16", "max_shard_size": "500KB"}
    folder = to_folder(converted.root, tmp_path / "exported", **options)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    expected = {name: t.to(torch.bfloat16) for name, t in tensors_in(made).items()}
    assert same_tensors(tensors_in(folder), expected)
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    to_checkpoint(folder, tmp_path / "again")
    with pytest.raises(UserError, match="--max-shard-size many"):
        to_folder(converted.root, tmp_path / "exported", max_shard_size="many")


def test_a_pickle_is_read_only_with_allow_pickle_and_runs_no_code(folder, tmp_path, converted):
    output, path, ran = tmp_path / "checkpoint", folder / "pytorch_model.bin", tmp_path / "ran"
    torch.save(tensors_in(folder), path)
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"pytorch_model\.bin.* --allow-pickle"):
        to_checkpoint(folder, output)
    assert not output.exists()
    assert to_checkpoint(folder, output, allow_pickle=True).hash == converted.hash
    content = {"transformer.wte.weight": PickledCode(ran), "of_some_size": torch.zeros(10**6)}
    torch.save(content, path)
    torch.load(path, weights_only=False)
    ran.rmdir()
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        to_checkpoint(folder, output, allow_pickle=True, overwrite=True)
    assert not ran.exists()
    assert CheckpointRecord.load(output).hash == converted.hash


@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_pickle_is_a_user_error(tmp_path, zipped):
    path, rng, rejected = tmp_path / "pytorch_model.bin", random.Random(0), 0
    tensors = {"a": torch.ones(4, 3), "b": torch.arange(5)}
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    # Most bytes of the zip file are padding, so only its beginning, which holds the pickle, is
    # damaged.
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


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*permissions and its disk"):
        stored_types([tmp_path])  # a folder, since root may read every file


def write_index(folder, shard):
    (folder / WEIGHTS).rename(folder / f"{WEIGHTS}.index.json")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json:1"),
    "many layers": (lambda f: change_config(f, n_layer=10**9), "parameters"),
    "damaged": (lambda f: (f / WEIGHTS).write_bytes(b"x" * 10**7), r"model\.safetensors"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    "shards elsewhere": (lambda f: write_index(f, "../gpt2/gone.safetensors"), "weight_map"),
    "a pickle as a shard": (lambda f: write_index(f, "pytorch_model.bin"), "weight_map"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_invalid_folder_is_rejected_and_nothing_written(folder, tmp_path, fault):
    damage, named = FAULTS[fault]
    damage(folder)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=rf"^[^\n]*{named}[^\n]*$"):
        to_checkpoint(folder, tmp_path / "checkpoint")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("marker", ["config.json", "checkpoint.json"])
def test_existing_output_is_kept_unless_it_can_be_replaced(made, converted, tmp_path, marker):
    output = tmp_path / "out"

    def convert(*, overwrite):
        if marker == "config.json":
            to_folder(converted.root, output, overwrite=overwrite)
        else:
            to_checkpoint(made, output, overwrite=overwrite)

    output.mkdir()
    (output / "notes.txt").touch()
    with pytest.raises(UserError, match=re.escape(marker)):
        convert(overwrite=True)
    (output / marker).write_text("of before")
    with pytest.raises(UserError, match="--overwrite"):
        convert(overwrite=False)
    with largest_file_size(100_000), pytest.raises(UserError, match=str(output)):
        convert(overwrite=True)
    assert {path.name for path in output.iterdir()} == {"notes.txt", marker}
    convert(overwrite=True)
    assert not (output / "notes.txt").exists()
    assert list(tmp_path.iterdir()) == [output]


def test_weights_that_dtype_cannot_represent_are_rejected_by_name(folder, tmp_path):
    tensors = tensors_in(folder)
    tensors["transformer.ln_f.bias"][3] = 1e5
    save_file(tensors, folder / WEIGHTS)
    record = to_checkpoint(folder, tmp_path / "checkpoint")
    with pytest.raises(UserError, match=r"transformer\.ln_f\.bias"):
        to_folder(record.root, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_a_tiktoken_file_is_copied(folder, tmp_path):
    path = tmp_path / "t.tiktoken"
    write_tiktoken(folder / "tokenizer.json", path)
    options = {"tokenizer_model": path, "tiktoken_pattern": "gpt2"}
    record = to_checkpoint(folder, tmp_path / "checkpoint", **options)
    back = to_folder(record.root, tmp_path / "back")
    (copy,) = back.glob("tokenizer.*")
    assert copy.read_bytes() == path.read_bytes()
    assert not (back / "tokenizer_config.json").exists()


def test_embedding_rows_beyond_the_tokenizer_are_left_out(folder, tmp_path, capsys):
    """Many public models round the number of embedding rows up beyond the number of tokens."""
    path = tmp_path / "small.json"
    path.write_bytes(byte_level_bpe(iter(TEXTS), VOCAB_SIZE - 20, EOD))
    record = to_checkpoint(folder, tmp_path / "checkpoint", tokenizer_model=path)
    out = capsys.readouterr().out
    assert "the last 20 of its 300 embedding rows" in out
    assert "dropout of 0.1" in out
    assert CheckpointModel(record).config.vocab_size == VOCAB_SIZE - 20
    back = tensors_in(to_folder(record.root, tmp_path / "back"))
    expected = tensors_in(folder)["transformer.wte.weight"][: VOCAB_SIZE - 20]
    assert torch.equal(back["transformer.wte.weight"], expected)


def made_with(record, **options):
    """Return the record as if the checkpoint had been made with ``options``."""
    made_by = dataclasses.replace(record.provenance, options=options)
    return dataclasses.replace(record, provenance=made_by)


@pytest.mark.parametrize("is_passed", [False, True])
def test_the_tokenizer_is_found_through_its_corpus(converted, tmp_path, is_passed):
    file = word_tokenizer(tmp_path / "tokenizer.json")
    corpus = write_small_corpus(tmp_path, tokenizer_hash=sha256_of_files(file))
    record = dataclasses.replace(converted, tokenizer_hash=corpus.tokenizer.sha256)
    record = made_with(record, **({} if is_passed else {"corpus": str(corpus.root)}))
    choice = TokenizerChoice(tokenizer_model=corpus.root if is_passed else None)
    assert CheckpointModel(record, choice).tokenizer().identity == corpus.tokenizer
    with pytest.raises(UserError, match="--tokenizer-model"):
        CheckpointModel(dataclasses.replace(record, tokenizer_hash="0" * 64), choice).tokenizer()


def test_the_recorded_eod_token_is_used(converted, folder, tmp_path):
    """Documents end with </s>, although the tokenizer also has <|endoftext|>."""
    tokenizer = Tokenizer.from_str(byte_level_bpe(iter(TEXTS), VOCAB_SIZE - 1, EOD).decode())
    assert tokenizer.add_special_tokens(["</s>"]) == 1
    tokenizer.save(str(folder / "tokenizer.json"))
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "back"
    to_checkpoint(folder, checkpoint, eod_token="</s>")
    to_folder(checkpoint, back)
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == VOCAB_SIZE - 1
    assert transformers.AutoTokenizer.from_pretrained(back).eos_token == "</s>"
    to_folder(checkpoint, back, eod_token=EOD, overwrite=True)
    assert transformers.AutoTokenizer.from_pretrained(back).eos_token == EOD


def test_a_relative_tokenizer_path_is_resolved_from_the_runs_working_directory(
    converted, folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    made_by = provenance(ToHuggingFaceOptions(Path("run"), Path("out")), {})
    record = dataclasses.replace(converted, provenance=made_by)
    record = made_with(record, model="gpt2", eod_token=EOD)
    monkeypatch.chdir("/")
    assert CheckpointModel(record, TokenizerChoice()).tokenizer().sha256 == converted.tokenizer_hash
    folder.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=str(folder)):
        CheckpointModel(record, TokenizerChoice()).tokenizer()
