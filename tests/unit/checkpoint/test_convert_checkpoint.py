"""Folders of transformers to checkpoints and back, on disk. Layouts are in tests/distributed."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import runpy
import shutil
import stat
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from megatron_chameleon.artifacts import CheckpointRecord, provenance
from megatron_chameleon.artifacts.checkpoint import FILE_NAME
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.convert import (
    convert_from_huggingface,
    convert_to_huggingface,
    find_tokenizer,
)
from megatron_chameleon.checkpoint.reader import open_reader, shape_of
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state
from megatron_chameleon.corpus.tokenization.awkward_texts import awkward_texts
from megatron_chameleon.corpus.tokenization.tokenizer import load_tokenizer
from megatron_chameleon.corpus.tokenization.training import byte_level_bpe, sentencepiece_bpe
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.options.convert import FromHuggingFaceOptions, ToHuggingFaceOptions
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.parallel.layout import distributed
from tests.small_corpus import word_tokenizer, write_small_corpus
from tests.unit.checkpoint.pickled_code import PickledCode
from tests.unit.checkpoint.test_checkpoint_round_trip import record_at
from tests.unit.corpus.tokenizer_samples import EOD, write_gpt2_files, write_tiktoken

ROOT = Path(__file__).resolve().parents[3]
TEXTS = [f"the {word} of a text, and {number} more\n" for number, word in enumerate("abcdefgh" * 9)]
VOCAB_SIZE, POSITIONS = 300, 24
WEIGHTS = "model.safetensors"
# Of weights that are small: logits are about 1.
CONFIG: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 3,
    "n_embd": 150,
    "n_positions": POSITIONS,
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.2,
    "bos_token_id": VOCAB_SIZE - 1,
    "eos_token_id": VOCAB_SIZE - 1,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What transformers itself writes of a GPT-2, with a tokenizer; for reading only."""
    folder = tmp_path_factory.mktemp("made") / "gpt2"
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG)).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(byte_level_bpe(iter(TEXTS), VOCAB_SIZE, EOD))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy of it, to do with as one likes."""
    return Path(shutil.copytree(made, tmp_path / "gpt2"))


@pytest.fixture(scope="module")
def converted(made, tmp_path_factory):
    """The checkpoint that is made of it; for reading only."""
    output = tmp_path_factory.mktemp("converted") / "checkpoint"
    convert_from_huggingface(FromHuggingFaceOptions(made, output))
    return CheckpointRecord.load(output)


@pytest.fixture
def exported(converted, tmp_path):
    """``exported(**changes)``: the folder that is made of the checkpoint again."""

    def export(**changes):
        convert_to_huggingface(
            ToHuggingFaceOptions(converted.root, tmp_path / "exported", **changes)
        )
        return tmp_path / "exported"

    return export


def tensors_in(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def same_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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
    expected = logits_of(theirs)
    assert theirs.config.activation_function == "gelu_new"
    assert expected.std() > 0.1
    torch.testing.assert_close(logits_of(converted), expected, atol=1e-5, rtol=0)


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
    torch.testing.assert_close(logits_of(model), logits_of(converted), atol=1e-5, rtol=0)
    printed = capsys.readouterr().out
    assert f"written to {folder} in float32, with its tokenizer.json" in printed


def test_transformers_encodes_as_we_do(exported, made):
    ours = load_tokenizer(made, EOD)
    theirs = transformers.AutoTokenizer.from_pretrained(exported())
    assert theirs.eos_token == EOD
    assert theirs.eos_token_id == ours.eod_id
    texts = awkward_texts(())
    for text, ids in zip(texts, ours.encoder.encode_batch(texts), strict=True):
        assert theirs(text)["input_ids"] == ids.tolist()
        assert theirs.decode(ids) == ours.decode(ids.tolist())


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


def test_gpt2s_own_pair_of_tokenizer_files_is_one(folder, tmp_path):
    write_gpt2_files(folder / "tokenizer.json", folder)
    (folder / "tokenizer.json").unlink()
    convert_from_huggingface(FromHuggingFaceOptions(folder, tmp_path / "checkpoint"))
    record = CheckpointRecord.load(tmp_path / "checkpoint")
    assert record.tokenizer_hash == load_tokenizer(folder, EOD).sha256
    convert_to_huggingface(ToHuggingFaceOptions(record.root, tmp_path / "back"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    ours = load_tokenizer(folder, EOD)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encoder.encode_batch([text])[0].tolist()


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_a_tokenizer_that_transformers_cannot_open_is_told(folder, tmp_path, kind, capsys):
    given = tmp_path / ("t.model" if kind == "sentencepiece" else "t.tiktoken")
    if kind == "sentencepiece":
        given.write_bytes(sentencepiece_bpe(iter(TEXTS), VOCAB_SIZE, EOD))
    else:
        write_tiktoken(folder / "tokenizer.json", given)
    asked = {"tokenizer_model": given}
    if kind == "tiktoken":
        asked["tiktoken_pattern"] = "gpt2"
    convert_from_huggingface(FromHuggingFaceOptions(folder, tmp_path / "checkpoint", **asked))
    capsys.readouterr()
    convert_to_huggingface(ToHuggingFaceOptions(tmp_path / "checkpoint", tmp_path / "back"))
    told = f"which AutoTokenizer does not read: encode with the package {kind}\n"
    assert told in capsys.readouterr().out
    (copy,) = (tmp_path / "back").glob("tokenizer.*")
    assert copy.read_bytes() == given.read_bytes()
    assert not (tmp_path / "back" / "tokenizer_config.json").exists()


@pytest.fixture
def pickled(folder):
    """The same folder with its weights in torch's own format alone."""
    torch.save(tensors_in(folder), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    return folder


def test_a_pickle_is_read_only_where_that_is_asked_for(pickled, tmp_path, converted):
    output = tmp_path / "checkpoint"
    with pytest.raises(UserError, match=r"pytorch_model\.bin alone, .* --allow-pickle"):
        convert_from_huggingface(FromHuggingFaceOptions(pickled, output))
    assert not output.exists()
    convert_from_huggingface(FromHuggingFaceOptions(pickled, output, allow_pickle=True))
    assert CheckpointRecord.load(output).hash == converted.hash


def test_code_in_a_pickle_is_not_run_even_then(pickled, tmp_path):
    ran = tmp_path / "ran"
    torch.save({"transformer.wte.weight": PickledCode(ran)}, pickled / "pytorch_model.bin")
    torch.load(pickled / "pytorch_model.bin", weights_only=False)
    assert ran.exists()
    ran.rmdir()
    options = FromHuggingFaceOptions(pickled, tmp_path / "checkpoint", allow_pickle=True)
    with pytest.raises(UserError, match=r"cannot read .*pytorch_model\.bin \(.*it is damaged"):
        convert_from_huggingface(options)
    assert not ran.exists()


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
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "JSON object is expected"),
    "other model": (lambda f: change_config(f, model_type="opt"), "field model_type 'opt'"),
    "other width": (lambda f: change_config(f, n_inner=500), r"is \[150, 600\], .* \[150, 500\]"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "holds no weights: there is no model.safe"),
    "damaged": (lambda f: (f / WEIGHTS).write_bytes(b"x" * 99), r"cannot read .*model\.safete"),
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
        r"gone\.safetensors is missing, which",
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


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder, tmp_path):
    given = tmp_path / "large.json"
    given.write_bytes(byte_level_bpe(iter(TEXTS), VOCAB_SIZE + 1, EOD))
    options = FromHuggingFaceOptions(folder, tmp_path / "checkpoint", tokenizer_model=given)
    with pytest.raises(UserError, match=r"a vocabulary of 300 is too small .* up to 300; give"):
        convert_from_huggingface(options)


def test_rows_beyond_the_tokenizer_are_left_out(folder, tmp_path, capsys):
    """As of the many public models that have a round number of rows."""
    given = tmp_path / "small.json"
    given.write_bytes(byte_level_bpe(iter(TEXTS), VOCAB_SIZE - 20, EOD))
    options = FromHuggingFaceOptions(folder, tmp_path / "checkpoint", tokenizer_model=given)
    convert_from_huggingface(options)
    assert "the last 20 of its 300 rows of embedding are left out: " in capsys.readouterr().out
    shape = shape_of(CheckpointRecord.load(tmp_path / "checkpoint"))
    assert shape.vocab_size == VOCAB_SIZE - 20
    convert_to_huggingface(ToHuggingFaceOptions(tmp_path / "checkpoint", tmp_path / "back"))
    expected = tensors_in(folder)["transformer.wte.weight"][: VOCAB_SIZE - 20]
    assert torch.equal(tensors_in(tmp_path / "back")["transformer.wte.weight"], expected)


def test_the_tokenizer_of_another_model_is_refused(converted, tmp_path):
    given = tmp_path / "other.json"
    given.write_bytes(byte_level_bpe(iter(TEXTS[:9]), 280, EOD))
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out", tokenizer_model=given)
    with pytest.raises(UserError, match=r"other\.json is not the tokenizer that .* --tokenizer-mo"):
        find_tokenizer(options, converted)


def made_with(record, **options):
    """The same record, said to be made with these options."""
    made_by = dataclasses.replace(record.provenance, options=options)
    return dataclasses.replace(record, provenance=made_by)


def test_a_tokenizer_that_is_gone_has_to_be_given(converted, made, tmp_path):
    record = made_with(converted, model=str(tmp_path / "gone"))
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out")
    with pytest.raises(UserError, match=r"give it, or the corpus .*, by --tokenizer-model"):
        find_tokenizer(options, record)
    given = dataclasses.replace(options, tokenizer_model=made / "tokenizer.json")
    assert find_tokenizer(given, record).sha256 == record.tokenizer_hash


@pytest.mark.parametrize("is_given", [False, True])
def test_a_corpus_gives_its_tokenizer(converted, tmp_path, is_given):
    file = word_tokenizer(tmp_path / "tokenizer.json")
    corpus = write_small_corpus(tmp_path, tokenizer_hash=sha256_of_files(file))
    record = dataclasses.replace(converted, tokenizer_hash=corpus.tokenizer.sha256)
    record = made_with(record, **({} if is_given else {"corpus": str(corpus.root)}))
    given = corpus.root if is_given else None
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out", tokenizer_model=given)
    assert find_tokenizer(options, record).identity == corpus.tokenizer
    another = dataclasses.replace(record, tokenizer_hash="0" * 64)
    with pytest.raises(UserError, match="is not the tokenizer that"):
        find_tokenizer(options, another)


def test_the_tokenizer_of_megatrons_own_data_sets_is_found(converted, made, tmp_path):
    record = made_with(converted, corpus=None, data={"tokenizer_model": str(made)})
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out")
    assert find_tokenizer(options, record).sha256 == record.tokenizer_hash


def test_an_end_of_documents_that_only_a_corpus_knows_is_told(converted, made, tmp_path):
    record = made_with(converted, corpus=str(tmp_path / "gone"), data={"eod_token": "not of it"})
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out", tokenizer_model=made)
    with pytest.warns(UserWarning, match=r"<\|endoftext\|> is taken; give --eod-token"):
        assert find_tokenizer(options, record).sha256 == record.tokenizer_hash
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_tokenizer(dataclasses.replace(options, eod_token=EOD), record)


@pytest.fixture
def ended_otherwise(folder):
    """The folder of a model whose documents end with </s>, in whose tokenizer <|endoftext|> is."""
    tokenizer = Tokenizer.from_str(byte_level_bpe(iter(TEXTS), VOCAB_SIZE - 1, EOD).decode())
    assert tokenizer.add_special_tokens(["</s>"]) == 1
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_the_end_of_documents_is_what_the_checkpoint_was_made_with(ended_otherwise, tmp_path):
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "back"
    convert_from_huggingface(FromHuggingFaceOptions(ended_otherwise, checkpoint, eod_token="</s>"))
    convert_to_huggingface(ToHuggingFaceOptions(checkpoint, back))
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == VOCAB_SIZE - 1
    assert transformers.AutoTokenizer.from_pretrained(back).eos_token == "</s>"
    given = ToHuggingFaceOptions(checkpoint, back, eod_token=EOD, overwrite=True)
    convert_to_huggingface(given)
    assert transformers.AutoTokenizer.from_pretrained(back).eos_token == EOD


@pytest.mark.parametrize("is_given", [False, True])
def test_the_end_of_documents_of_megatrons_own_data_sets_is_known(
    converted, ended_otherwise, tmp_path, is_given
):
    record = dataclasses.replace(
        converted, tokenizer_hash=load_tokenizer(ended_otherwise, "</s>").sha256
    )
    data = {"tokenizer_model": str(ended_otherwise), "eod_token": "</s>"}
    record = made_with(record, corpus=None, data=data)
    given = ended_otherwise if is_given else None
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out", tokenizer_model=given)
    assert find_tokenizer(options, record).eod_id == VOCAB_SIZE - 1


def test_the_pattern_of_a_tiktoken_file_is_what_the_checkpoint_was_made_with(folder, tmp_path):
    given = write_tiktoken(folder / "tokenizer.json", tmp_path / "t.tiktoken")
    options = FromHuggingFaceOptions(
        folder, tmp_path / "checkpoint", tokenizer_model=given, tiktoken_pattern="gpt2"
    )
    convert_from_huggingface(options)
    record = CheckpointRecord.load(options.output)
    found = find_tokenizer(ToHuggingFaceOptions(options.output, tmp_path / "back"), record)
    assert found.sha256 == record.tokenizer_hash


@pytest.mark.parametrize("by", ["model", "corpus"])
def test_a_relative_path_is_followed_from_where_it_was_given(converted, tmp_path, monkeypatch, by):
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "corpus").mkdir(parents=True)
    here.mkdir()
    file = word_tokenizer(there / "corpus" / "tokenizer.json")
    corpus = write_small_corpus(there / "corpus", tokenizer_hash=sha256_of_files(file))
    record = dataclasses.replace(converted, tokenizer_hash=corpus.tokenizer.sha256)
    given = Path(os.path.relpath(corpus.root if by == "corpus" else file, there))
    monkeypatch.chdir(there)
    made_by = provenance(ToHuggingFaceOptions(Path("run"), Path("out")), {})
    record = made_with(dataclasses.replace(record, provenance=made_by), **{by: str(given)})
    monkeypatch.chdir(here)
    options = ToHuggingFaceOptions(converted.root, tmp_path / "out", eod_token=None)
    assert find_tokenizer(options, record).sha256 == corpus.tokenizer.sha256
    there.rename(tmp_path / "moved")
    told = f"is no longer at {there / given}; give it, .*by --tokenizer-model"
    with pytest.raises(UserError, match=told):
        find_tokenizer(options, record)
    monkeypatch.chdir(tmp_path / "moved")  # all of it has moved
    assert find_tokenizer(options, record).sha256 == corpus.tokenizer.sha256


@pytest.mark.parametrize("option", ["tiktoken_pattern", "eod_token"])
@pytest.mark.parametrize("is_given", [False, True])
def test_what_a_corpus_says_itself_is_refused(converted, tmp_path, option, is_given):
    corpus = write_small_corpus(tmp_path).root
    record = made_with(converted, corpus=str(corpus))
    options = ToHuggingFaceOptions(
        converted.root, tmp_path / "out", tokenizer_model=corpus if is_given else None
    )
    given: dict[str, Any] = {option: "gpt2"}
    options = dataclasses.replace(options, **given)
    told = f"--{option.replace('_', '-')} gpt2: the corpus {corpus} says it itself; leave the"
    with pytest.raises(UserError, match=told):
        find_tokenizer(options, record)


def test_a_model_whose_replacement_was_killed_is_not_replaced_unasked(converted, made, tmp_path):
    output = tmp_path / "out"
    back = FromHuggingFaceOptions(made, output)
    to = ToHuggingFaceOptions(converted.root, output)
    for convert in (lambda: convert_from_huggingface(back), lambda: convert_to_huggingface(to)):
        convert()
        output.rename(tmp_path / ".out.replaced")
        with pytest.raises(UserError, match="or --overwrite to replace"):
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
        (lambda p: p.write_text("a file"), "is no folder of its own"),
        (lambda p: (p.mkdir(), (p / "notes.txt").touch()), "holds other files and no config.json"),
        (lambda p: (p.mkdir(), (p / "config.json").touch()), "already; .*, or --overwrite to"),
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
    with pytest.raises(UserError, match=r"holds a checkpoint\.json already"):
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
    with pytest.raises(UserError, match=rf"--max-shard-size {size}: .* as in 5GB"):
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
    assert capsys.readouterr().err.startswith(f"error: --output {theirs} holds a config.json")
