"""Every tool reads a Megatron-LM checkpoint like a checkpoint of the same weights."""

from __future__ import annotations

import dataclasses
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_chameleon.artifacts import EmbeddingStore, EvaluationResult, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, checkpoint_folders
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.convert import convert_to_huggingface
from megatron_chameleon.checkpoint.open_model import CheckpointModel
from megatron_chameleon.checkpoint.options import ToHuggingFaceOptions
from megatron_chameleon.evaluation.options import PerplexityOptions
from megatron_chameleon.evaluation.perplexity import evaluate_perplexities
from megatron_chameleon.methods.chameleon import ChameleonOptions, ExtractionOptions
from megatron_chameleon.methods.chameleon.compute import compute_mixture
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.training.trainer import pretrain
from tests.families import FAMILIES, LENGTH
from tests.megatron_checkpoint import ITERATION, arguments, megatron_model, save_megatron
from tests.small_corpus import DOMAINS, VOCAB_SIZE, word_tokenizer, write_small_corpus

ROOT = Path(__file__).resolve().parents[3]
CONFIG = dataclasses.replace(FAMILIES["llama"], vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folder of a corpus, a Megatron-LM checkpoint ``theirs``, and ``ours``, made of it."""
    root = tmp_path_factory.mktemp("inputs")
    tokenizer = word_tokenizer(root / "tokenizer.json")
    write_small_corpus(root / "corpus", tokenizer_hash=sha256_of_files(tokenizer))
    args = arguments(CONFIG, tokenizer)
    with distributed(ParallelOptions(), seed=0) as layout:
        save_megatron(root / "theirs", megatron_model(args, layout), args)
    flags = ["from-megatron", "--checkpoint", root / "theirs", "--output", root / "ours"]
    tool = str(ROOT / "tools" / "convert_checkpoint.py")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [tool, *map(str, flags)])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(tool, run_name="__main__")
    assert exit_.value.code == 0
    return root


def test_a_conversion_holds_the_weights_alone(root):
    record = CheckpointRecord.load(root / "ours")
    record.verify()
    assert (CheckpointModel(record).config, record.step) == (CONFIG, ITERATION)
    assert sum(file.bytes for file in record.files.values()) < 5 * CONFIG.num_parameters


def test_vectors_and_losses_equal_those_of_the_converted_checkpoint(root, tmp_path):
    corpus, vectors, losses = root / "corpus", {}, {}
    for name in ("theirs", "ours"):
        checkpoint, output = root / name, tmp_path / name
        options = ChameleonOptions(
            corpus=corpus,
            checkpoint=checkpoint,
            output=output / "mixture.json",
            extraction=ExtractionOptions(num_windows=20),
        )
        compute_mixture(options)
        store = EmbeddingStore.load(output / "embeddings")
        vectors[name] = {domain: store.vectors(domain) for domain in DOMAINS}
        result = output / "evaluation.json"
        evaluation = PerplexityOptions(corpus=corpus, checkpoint=checkpoint, output=result)
        evaluate_perplexities([evaluation])
        losses[name] = EvaluationResult.load(result).domains
    assert losses["theirs"] == losses["ours"]
    for domain in DOMAINS:
        assert (vectors["theirs"][domain] == vectors["ours"][domain]).all()
        assert vectors["ours"][domain].std() > 0.01


def test_it_is_fine_tuned_and_exported(root, pretrain_options, tmp_path):
    run = tmp_path / "run"
    start = {"model": None, "pretrained_checkpoint": root / "theirs", "seq_length": LENGTH}
    pretrain(pretrain_options(run, corpus=root / "corpus", train_iters=3, **start))
    assert TrainingRun.load(run).model == dataclasses.asdict(CONFIG)
    assert len(checkpoint_folders(run)) == 1
    exported = tmp_path / "exported"
    convert_to_huggingface(ToHuggingFaceOptions(root / "theirs", exported))
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    with distributed(ParallelOptions(), seed=0) as layout, torch.no_grad():
        reader = CheckpointModel(CheckpointRecord.load(root / "ours")).reader(layout)
        ours = reader.model(tokens, torch.arange(LENGTH).expand_as(tokens), None)
        theirs = model(tokens).logits
    torch.testing.assert_close(ours[..., :VOCAB_SIZE], theirs, rtol=1e-4, atol=1e-4)
