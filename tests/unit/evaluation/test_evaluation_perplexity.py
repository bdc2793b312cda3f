"""tools/evaluate.py perplexity on one rank, from checkpoint and corpus to the result on disk."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Corpus,
    EvaluationResult,
    Protocol,
    find_checkpoint,
)
from megatron_chameleon.checkpoint.reader import open_reader, shape_of
from megatron_chameleon.corpus.indexed_reader import open_tokens
from megatron_chameleon.corpus.indexed_writer import IndexedWriter
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.perplexity import evaluate_perplexities, evaluate_perplexity
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.options.evaluation import PerplexityOptions
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.parallel.layout import distributed
from tests.small_corpus import write_small_corpus
from tests.unit.poison import poison_checkpoint


@pytest.fixture
def options(corpus, finished_run, tmp_path):
    """One evaluation of the finished run."""
    return PerplexityOptions(
        corpus=corpus.root, checkpoint=finished_run, output=tmp_path / "result.json"
    )


@pytest.fixture
def evaluate(options):
    """``evaluate(**changes)``: the result of one evaluation of the finished run."""
    return lambda **changes: evaluate_perplexity(dataclasses.replace(options, **changes))


@pytest.fixture(scope="module")
def expected_losses(corpus, finished_run):
    """Loss per domain of the test split by a plain loop, one window of 32 tokens at a time."""
    losses = {}
    with distributed(ParallelOptions(), seed=0) as layout:
        reader = open_reader(CheckpointRecord.load(find_checkpoint(finished_run)), layout)
        for name in corpus.names:
            stream = open_tokens(corpus, name, "test").tokens.astype(np.int64)
            total = 0.0
            for first in range(0, len(stream) - 1, 32):
                window = torch.from_numpy(stream[first : first + 33])[None]
                losses_of = reader.token_losses(window[:, :-1], window[:, 1:])
                assert losses_of is not None
                total += losses_of.double().sum().item()
            losses[name] = total / (len(stream) - 1)
    return losses


def test_the_result_is_that_of_a_plain_loop(evaluate, corpus, expected_losses, capsys):
    result = evaluate()
    assert list(result.domains) == corpus.names
    table = capsys.readouterr().out
    for name, domain in result.domains.items():
        assert domain.loss == pytest.approx(expected_losses[name], abs=1e-6)
        assert domain.tokens == corpus.domains[name].test.tokens - 1
        assert f"{name} " in table
        assert f"{math.exp(expected_losses[name]):.2f}" in table


def test_the_unigram_model_is_that_of_the_domains_own_training_text(evaluate, corpus):
    vocab_size = corpus.tokenizer.vocab_size
    for name, domain in evaluate().domains.items():
        training = open_tokens(corpus, name, "train").tokens.tolist()
        labels = open_tokens(corpus, name, "test").tokens.tolist()[1:]
        expected = [
            -math.log((training.count(label) + 1) / (len(training) + vocab_size))
            for label in labels
        ]
        assert domain.unigram_loss == pytest.approx(sum(expected) / len(labels), rel=1e-9)


def test_the_file_says_how_it_was_made(evaluate, corpus, finished_run, tmp_path):
    result = evaluate(output=tmp_path / "deeper" / "r.json", max_tokens=64)
    assert EvaluationResult.load(tmp_path / "deeper" / "r.json") == result
    record = CheckpointRecord.load(find_checkpoint(finished_run))
    assert result.checkpoint == str(record.root)
    assert result.checkpoint_hash == record.hash
    assert result.corpus_hash == corpus.hash
    assert result.provenance.inputs == {"corpus": corpus.hash, "checkpoint": record.hash}
    assert result.step == 6
    assert result.protocol == Protocol("test", 32, max_tokens=64)
    assert result.cost.flops == forward_flops(shape_of(record), 3 * 64, 32)


@pytest.mark.parametrize("batch_size", [1, 1000])
def test_the_batch_size_does_not_change_the_result(evaluate, expected_losses, batch_size):
    result = evaluate(evaluation_batch_size=batch_size)
    for name, domain in result.domains.items():
        assert domain.loss == pytest.approx(expected_losses[name], abs=1e-6)


def test_some_windows_of_a_domain_can_be_enough(evaluate, corpus):
    for name, domain in evaluate(max_tokens=100).domains.items():
        assert corpus.domains[name].test.tokens > 100
        assert domain.tokens == 3 * 32
    everything = evaluate(max_tokens=10**9)
    assert everything.domains == evaluate().domains


def test_an_earlier_checkpoint_and_another_split_can_be_chosen(evaluate, finished_run, corpus):
    result = evaluate(checkpoint=finished_run / "checkpoints" / "step-00000003", split="valid")
    assert result.step == 3
    assert {d.tokens for d in result.domains.values()} == {
        domain.valid.tokens - 1 for domain in corpus.domains.values()
    }


@pytest.fixture
def two_checkpoints(options, finished_run, tmp_path):
    """The evaluation of an earlier checkpoint of the finished run, and that of its last one."""
    earlier = dataclasses.replace(
        options,
        checkpoint=finished_run / "checkpoints" / "step-00000003",
        output=tmp_path / "earlier.json",
    )
    return [earlier, options]


def test_several_checkpoints_get_what_each_gets_alone(two_checkpoints, capsys):
    found = evaluate_perplexities(two_checkpoints)
    said = capsys.readouterr().out
    assert [result.step for result in found] == [3, 6]
    for options, result in zip(two_checkpoints, found, strict=True):
        assert EvaluationResult.load(options.output) == result
        assert f"written to {options.output}; " in said
        alone = evaluate_perplexity(options)
        assert result.domains == alone.domains
        assert result.provenance.options == alone.provenance.options
        assert result.provenance.inputs == alone.provenance.inputs
        assert result.cost.flops == alone.cost.flops


def test_a_mistake_in_the_last_is_told_before_the_first_is_evaluated(two_checkpoints, tmp_path):
    first, last = two_checkpoints
    with pytest.raises(UserError, match="--checkpoint nowhere: neither a checkpoint nor a run"):
        evaluate_perplexities([first, dataclasses.replace(last, checkpoint=Path("nowhere"))])
    assert list(tmp_path.iterdir()) == []


def test_what_was_evaluated_before_a_model_that_has_diverged_is_kept(
    two_checkpoints, trained_run, tmp_path
):
    broken = find_checkpoint(trained_run)
    poison_checkpoint(broken, "decoder.layers.1.mlp.linear_fc2.bias")
    first, last = two_checkpoints
    with pytest.raises(UserError, match=rf"{re.escape(str(broken))}: the loss on domain 'news' is"):
        evaluate_perplexities([first, dataclasses.replace(last, checkpoint=trained_run)])
    assert EvaluationResult.load(first.output).step == 3
    assert not last.output.exists()


def test_shorter_windows_predict_the_same_tokens(evaluate):
    long, short = evaluate(), evaluate(window_length=5)
    for name in long.domains:
        assert short.domains[name].tokens == long.domains[name].tokens
        assert short.domains[name].loss != long.domains[name].loss


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"window_length": 33}, "--window-length 33: the model has positions for 1 to 32 tokens"),
        ({"window_length": 0}, "--window-length 0"),
        ({"max_tokens": 31}, "--max-tokens 31 is less than one window of 32 tokens"),
        ({"evaluation_batch_size": 0}, "--evaluation-batch-size 0: give a whole number from 1 on"),
        ({"checkpoint": Path("nowhere")}, "--checkpoint nowhere: neither a checkpoint nor a run"),
        ({"corpus": Path("nowhere")}, r"nowhere/corpus\.json does not exist; tools/preprocess_"),
        ({"parallel": ParallelOptions(3)}, r"1 rank\(s\) cannot be laid out as tensor 3"),
        ({"parallel": ParallelOptions(2)}, r"1 rank\(s\) cannot be laid out as tensor 2"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_written(evaluate, tmp_path, changes, problem):
    with pytest.raises(UserError, match=problem):
        evaluate(**changes)
    assert list(tmp_path.iterdir()) == []


def test_another_tokenizer_is_refused(evaluate, tmp_path):
    other = write_small_corpus(tmp_path / "other", tokenizer_hash="9" * 64)
    with pytest.raises(UserError, match=r"trained with another tokenizer than .*--tokenizer-model"):
        evaluate(corpus=other.root)


@pytest.mark.parametrize("left", [0, 1])
def test_a_split_with_nothing_to_predict_is_told_with_its_domain(evaluate, tmp_path, left):
    corpus = write_small_corpus(tmp_path / "corpus")
    name = corpus.names[1]
    prefix = corpus.prefix(name, "test")
    for suffix in (".bin", ".idx"):
        Path(f"{prefix}{suffix}").unlink()
    writer = IndexedWriter(prefix, corpus.dtype)
    for _ in range(left):
        writer.add(np.zeros(1, np.int32))
    writer.finish()
    domain = corpus.domains[name]
    empty = dataclasses.replace(domain.test, documents=left, tokens=left)
    domains = {**corpus.domains, name: dataclasses.replace(domain, test=empty)}
    dataclasses.replace(corpus, domains=domains).save()
    assert Corpus.load(corpus.root).domains[name].test.tokens == left
    problem = f"domain '{name}' has {left} tokens in its test split: nothing to predict"
    with pytest.raises(UserError, match=problem):
        evaluate(corpus=corpus.root)


def test_a_model_that_has_diverged_is_told_and_nothing_is_written(evaluate, trained_run, tmp_path):
    poison_checkpoint(find_checkpoint(trained_run), "decoder.layers.1.mlp.linear_fc2.bias")
    with pytest.raises(UserError, match="loss on domain 'news' is nan: the model has diverged"):
        evaluate(checkpoint=trained_run)
    assert not (tmp_path / "result.json").exists()
