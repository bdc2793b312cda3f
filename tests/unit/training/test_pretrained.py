"""Test runs that start from a trained checkpoint or from a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from megatron_chameleon.artifacts import Corpus, Split, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, step_folder
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.open_model import CheckpointModel, open_model
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.huggingface_config import config_fields
from megatron_chameleon.model.options import ArchitectureOptions
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.training.options import OptimizerOptions, ValidationOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.trainer import pretrain
from tests.families import llama
from tests.rounding import assert_as_near
from tests.small_corpus import VOCAB_SIZE, ring_document, word_tokenizer, write_small_corpus
from tests.unit.checkpoint.samples import change_config
from tests.unit.training.runs import losses, progress_of_run, weights_at

POSITIONS = 40
# The weights are so large that logits are about 1.
NANO = {"n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": POSITIONS, "vocab_size": 320}
UNNAMED = {"n_layer": 3, "n_head": 2, "n_embd": 48, "n_inner": 80, "n_positions": 32}
UNNAMED |= {"vocab_size": VOCAB_SIZE, "activation_function": "gelu"}  # type: ignore[dict-item]
FROZEN = OptimizerOptions(lr=1e-9, min_lr=0.0, lr_warmup_iters=0, weight_decay=0.0)


def write_gpt2(folder: Path, **config) -> Path:
    torch.manual_seed(0)
    settings = transformers.GPT2Config(**{"initializer_range": 0.2, **config})
    transformers.GPT2LMHeadModel(settings).save_pretrained(folder)
    return folder


@pytest.fixture
def gpt2(tmp_path) -> Path:
    return write_gpt2(tmp_path / "gpt2", **NANO)


@pytest.fixture
def options_for(pretrain_options, tmp_path):
    """``options_for(weights, **changes)``: options of a run that barely changes ``weights``."""

    def options(weights, **changes):
        settings = {"model": None, "train_iters": 2, "save_interval": 1, "optimizer": FROZEN}
        return pretrain_options(
            tmp_path / "run", pretrained_checkpoint=weights, **{**settings, **changes}
        )

    return options


def test_run_starts_from_a_checkpoint_and_resumes_from_its_own(
    options_for, finished_run, tmp_path, capsys
):
    options = options_for(finished_run, seq_length=16, seed=77)
    pretrain(options)
    run_dir = options.run_dir
    before, after = weights_at(finished_run, 6), weights_at(run_dir, 1)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-7)
    record = CheckpointRecord.load(step_folder(run_dir, 1))
    assert (record.step, record.samples) == (1, 8)
    assert CheckpointModel(record).config.max_sequence_length == 32
    weights = CheckpointRecord.load(step_folder(finished_run, 6)).hash
    assert TrainingRun.load(run_dir).provenance.inputs["pretrained checkpoint"] == weights
    assert "initial weights: " in capsys.readouterr().out
    whole = losses(run_dir)
    shutil.rmtree(step_folder(run_dir, 2))
    moved = shutil.copytree(finished_run, tmp_path / "moved")
    pretrain(dataclasses.replace(options, pretrained_checkpoint=moved))
    assert "initial weights: " not in capsys.readouterr().out
    assert losses(run_dir) == whole
    for other in (step_folder(finished_run, 3), None):
        changed = dataclasses.replace(options, pretrained_checkpoint=other, model="nano")
        with pytest.raises(UserError, match="holds a run with another pretrained checkpoint"):
            progress_of_run(changed)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (NANO, ModelConfig(4, 4, 64, 256, VOCAB_SIZE, POSITIONS, activation="gelu_tanh")),
        (UNNAMED, ModelConfig(3, 2, 48, 80, VOCAB_SIZE, 32, activation="gelu")),
    ],
    ids=["padded", "unnamed"],
)
def test_run_from_a_gpt2_folder_has_the_logits_of_transformers(
    options_for, tmp_path, config, shape
):
    folder = write_gpt2(tmp_path / "gpt2", **config)
    options = options_for(folder)
    pretrain(options)
    checkpoint = CheckpointRecord.load(step_folder(options.run_dir, 1))
    assert CheckpointModel(checkpoint).config == shape
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (2, shape.max_sequence_length), generator=generator)
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    with distributed(ParallelOptions(), seed=0) as layout, torch.no_grad():
        reader = CheckpointModel(checkpoint).reader(layout)
        found = reader.model(tokens, positions, None)[..., :VOCAB_SIZE]
    reference, exact = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()(tokens)
        for dtype in (torch.float32, torch.float64)
    )
    assert exact.logits.std() > 0.1
    logits = (output.logits[..., :VOCAB_SIZE].detach() for output in (reference, exact))
    assert_as_near(found, *logits)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({}, {"model": "tiny"}, "--model tiny: .*gpt2 has .*64"),
        ({}, {"seq_length": 41}, "--seq-length 41: .*gpt2"),
        ({"vocab_size": 250}, {}, r"gpt2/config\.json: a vocabulary of 250 is too small"),
        ({"activation_function": "relu"}, {}, "activation_function 'relu'"),
        ({"vocab_size": 300}, {}, r"wte\.weight .*\[320, 64\]"),
        ({"n_layer": 5}, {}, r"gpt2 holds no tensor transformer\.h\.4"),
        ({}, {"pretrained_checkpoint": Path("nowhere")}, "--pretrained-checkpoint nowhere"),
    ],
)
def test_weights_that_do_not_fit_are_an_error(options_for, gpt2, config, changes, message):
    change_config(gpt2, **config)
    options = dataclasses.replace(options_for(gpt2), **changes)
    with pytest.raises(UserError, match=message):
        plan_training(options)
    assert not options.run_dir.exists()


def test_a_model_with_rotary_positions_starts_at_any_sequence_length(options_for, tmp_path):
    config = dataclasses.replace(llama(), vocab_size=VOCAB_SIZE, max_sequence_length=24)
    folder = tmp_path / "llama"
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(**config_fields(config, "float32", 0))
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    for seq_length, longest in ((16, 24), (32, 32)):
        for model in (None, str(folder)):
            options = options_for(folder, seq_length=seq_length, model=model)
            found = plan_training(options).config
            assert found == dataclasses.replace(config, max_sequence_length=longest)
    deeper = ArchitectureOptions(num_layers=5)
    with pytest.raises(UserError, match="num_layers 4, not 5"):
        plan_training(options_for(folder, model=str(folder), architecture=deeper))
    with pytest.raises(UserError, match=r"--num-layers 5: .*--pretrained-checkpoint"):
        options_for(folder, architecture=deeper)


@pytest.mark.parametrize("occurs_in", [None, "train", "valid"])
def test_only_text_with_tokens_beyond_the_embeddings_is_rejected(options_for, tmp_path, occurs_in):
    """The model's own tokenizer has one special token more than the model has embeddings."""
    folder = write_gpt2(tmp_path / "gpt2", **{**NANO, "vocab_size": VOCAB_SIZE})
    tokenizer = tokenizers.Tokenizer.from_file(str(word_tokenizer(folder / "tokenizer.json")))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    identity = load_tokenizer(folder / "tokenizer.json").identity
    assert identity.vocab_size == VOCAB_SIZE + 1

    splits = iter([*["train"] * 8, *["valid"] * 4, "test"] * 2)

    def document(number, rng):
        tokens = ring_document(number, rng)
        if number == 1 and next(splits) == occurs_in:
            tokens[::5] = VOCAB_SIZE
        return tokens

    counts: dict[Split, int] = {"train": 8, "valid": 4, "test": 1}
    corpus = write_small_corpus(
        tmp_path / "corpus", ("news", "code"), document=document, counts=counts
    )
    dataclasses.replace(corpus, tokenizer=identity).save()
    options = options_for(
        folder,
        corpus=corpus.root,
        validation=ValidationOptions(eval_interval=1, eval_iters=2, eval_first_step=True),
    )
    if occurs_in:
        with pytest.raises(UserError, match=f"token id {VOCAB_SIZE} of domain 'code'"):
            pretrain(options)
        return
    pretrain(options)
    model = open_model(options.run_dir).for_corpus(Corpus.load(corpus.root))
    assert model.config.vocab_size == VOCAB_SIZE


def test_another_tokenizer_is_an_error(options_for, finished_run, gpt2, tmp_path):
    file = word_tokenizer(tmp_path / "corpus-tokenizer.json")
    corpus = write_small_corpus(tmp_path / "corpus", tokenizer_hash=sha256_of_files(file))
    own = corpus.root / corpus.tokenizer.file
    shutil.copy(file, own)
    for added in ([], ["<pad>"]):
        tokenizer = tokenizers.Tokenizer.from_file(str(own))
        tokenizer.add_tokens(added)
        tokenizer.save(str(gpt2 / "tokenizer.json"))
        assert plan_training(options_for(gpt2, corpus=corpus.root)).pretrained is not None
    reversed_ids = {str(VOCAB_SIZE - token): token for token in range(VOCAB_SIZE)}
    model = tokenizers.models.WordLevel(reversed_ids, unk_token="1")
    tokenizers.Tokenizer(model).save(str(gpt2 / "tokenizer.json"))
    with pytest.raises(UserError, match="gpt2 was trained with another tokenizer"):
        plan_training(options_for(gpt2, corpus=corpus.root))
    own.unlink()
    with pytest.raises(UserError, match="gpt2 was trained with another tokenizer"):
        plan_training(options_for(gpt2, corpus=corpus.root))
    other = write_small_corpus(tmp_path / "other", tokenizer_hash="6" * 64)
    with pytest.raises(UserError, match="step-00000006 was trained with another tokenizer"):
        plan_training(options_for(finished_run, corpus=other.root))
