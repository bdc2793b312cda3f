"""Runs that start from a Hugging Face GPT-2 folder, as transformers writes it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, step_folder
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.load import open_reader, shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions, TrainingParallelOptions
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.trainer import pretrain
from tests.rounding import assert_as_near
from tests.small_corpus import VOCAB_SIZE, word_tokenizer, write_small_corpus
from tests.unit.training.progress import progress_of_run

POSITIONS = 40
# Weights that are not small: logits are about 1.
NANO = {"n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": POSITIONS, "vocab_size": 320}
NAMELESS = {"n_layer": 3, "n_head": 2, "n_embd": 48, "n_inner": 80, "n_positions": 32}
SHAPES: dict[str, tuple[dict[str, Any], ModelShape]] = {
    "padded": (NANO, ModelShape(ModelSize(4, 4, 64, 256), VOCAB_SIZE, POSITIONS, "gelu_tanh")),
    "of no named size": (
        {**NAMELESS, "vocab_size": VOCAB_SIZE, "activation_function": "gelu"},
        ModelShape(ModelSize(3, 2, 48, 80), VOCAB_SIZE, 32, "gelu"),
    ),
}
BARELY = OptimizerOptions(lr=1e-9, min_lr=0.0, lr_warmup_iters=0, weight_decay=0.0)


def write_folder(folder: Path, **config) -> Path:
    torch.manual_seed(0)
    settings = transformers.GPT2Config(**{"initializer_range": 0.2, **config})
    transformers.GPT2LMHeadModel(settings).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder of more rows than the corpus has tokens; for reading only."""
    return write_folder(tmp_path_factory.mktemp("made") / "gpt2", **NANO)


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy of it, to do with as one likes."""
    return Path(shutil.copytree(made, tmp_path / "gpt2"))


@pytest.fixture
def options_for(pretrain_options, tmp_path):
    """``options_for(folder, **changes)``: a run of two steps from it that says nothing of size."""

    def options(folder, **changes):
        settings = {"model_size": None, "train_iters": 2, "save_interval": 1, "optimizer": BARELY}
        return pretrain_options(
            tmp_path / "run", pretrained_checkpoint=folder, **{**settings, **changes}
        )

    return options


def logits_here(checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    with distributed(ParallelOptions(), seed=0) as layout, torch.no_grad():
        model = open_reader(CheckpointRecord.load(checkpoint), layout).model
        positions = torch.arange(tokens.size(1)).expand_as(tokens)
        return model(tokens, positions, None)[..., :VOCAB_SIZE]


def logits_there(
    folder: Path, tokens: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model.eval()(tokens).logits[..., :VOCAB_SIZE]


@pytest.mark.parametrize("name", SHAPES)
def test_a_run_starts_as_the_model_that_transformers_computes(options_for, tmp_path, name):
    config, shape = SHAPES[name]
    folder = write_folder(tmp_path / "gpt2", **config)
    options = options_for(folder)
    pretrain(options)
    checkpoint = step_folder(options.run_dir, 1)
    assert shape_of(CheckpointRecord.load(checkpoint)) == shape
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (2, shape.max_sequence_length), generator=generator)
    exact = logits_there(folder, tokens, torch.float64)
    assert exact.std() > 0.1
    reference = logits_there(folder, tokens)
    assert_as_near(logits_here(checkpoint, tokens), reference, exact)


def test_a_size_is_not_asked_for_and_a_name_is_found(options_for, made, tmp_path):
    assert plan_training(options_for(made)).options.model_size == "nano"
    nameless = write_folder(tmp_path / "other", vocab_size=VOCAB_SIZE, **NAMELESS)
    assert plan_training(options_for(nameless)).options.model_size is None


def test_a_checkpoint_says_its_size_too(options_for, finished_run):
    plan = plan_training(options_for(finished_run))
    assert (plan.options.model_size, plan.shape.size) == ("nano", ModelSize(4, 4, 64, 256))


def test_the_run_goes_on_whether_the_size_is_given_and_wherever_the_folder_lies(
    options_for, folder, tmp_path
):
    options = options_for(folder)
    pretrain(options)
    moved = folder.rename(tmp_path / "moved")
    options = dataclasses.replace(options, pretrained_checkpoint=moved, model_size="nano")
    assert progress_of_run(options).step == 2
    change_config(moved, activation_function="gelu")
    with pytest.raises(UserError, match="holds a run with pretrained checkpoint"):
        progress_of_run(options)


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("config", "changes", "told"),
    [
        (
            {},
            {"model_size": "tiny"},
            r"gpt2 has hidden_size 64, --model-size tiny has 128",
        ),
        (
            {},
            {"seq_length": 41},
            r"--seq-length 41: .*gpt2 .* has 40 positions",
        ),
        (
            {"vocab_size": 250},
            {},
            r"gpt2/config\.json: a vocabulary of 250 is too small for .*, whose tokenizer has 251 "
            r"tokens; preprocess the text with the model's own tokenizer \(--tokenizer-model\)",
        ),
        ({"activation_function": "relu"}, {}, r"field activation_function 'relu': not one of gelu"),
        ({"vocab_size": 300}, {}, r"wte\.weight is \[320, 64\], its config\.json asks for \[300"),
        ({"n_layer": 5}, {}, r"gpt2 holds no tensor transformer\.h\.4"),
    ],
)
def test_what_does_not_fit_is_refused(options_for, folder, tmp_path, config, changes, told):
    change_config(folder, **config)
    with pytest.raises(UserError, match=told) as refused:
        plan_training(options_for(folder, **changes))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_layout_that_does_not_divide_its_heads_is_refused(options_for, made):
    layout = TrainingParallelOptions(tensor_model_parallel_size=3)
    with pytest.raises(UserError, match="does not divide 4 attention heads"):
        plan_training(options_for(made, parallel=layout))


def test_weights_that_are_a_pickle_are_refused(options_for, folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"convert_checkpoint\.py .* --allow-pickle"):
        plan_training(options_for(folder))


@pytest.fixture
def tokenized(tmp_path):
    """A corpus with the tokenizer that it was made with."""
    file = word_tokenizer(tmp_path / "corpus-tokenizer.json")
    corpus = write_small_corpus(tmp_path / "corpus", tokenizer_hash=sha256_of_files(file))
    shutil.copy(file, corpus.root / corpus.tokenizer.file)
    return corpus


def with_tokens(file: Path, output: Path, added: list[str]) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_tokens(added)
    tokenizer.save(str(output))


@pytest.mark.parametrize("added", [[], ["<pad>"]])
def test_a_tokenizer_of_the_same_ids_is_taken_with_or_without_more(
    options_for, folder, tokenized, added
):
    own = tokenized.root / tokenized.tokenizer.file
    with_tokens(own, folder / "tokenizer.json", added)
    assert plan_training(options_for(folder, corpus=tokenized.root)).pretrained is not None


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_tokenizer_of_other_ids_is_refused(options_for, folder, tokenized, tmp_path, is_kept):
    names = {str(VOCAB_SIZE - token): token for token in range(VOCAB_SIZE)}
    model = tokenizers.models.WordLevel(names, unk_token="1")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    if not is_kept:
        (tokenized.root / tokenized.tokenizer.file).unlink()
    told = r"gpt2/tokenizer\.json has other token ids .* with --tokenizer-model .*gpt2, or"
    with pytest.raises(UserError, match=told):
        plan_training(options_for(folder, corpus=tokenized.root))
