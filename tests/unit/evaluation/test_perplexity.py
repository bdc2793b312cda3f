"""tools/evaluate.py perplexity on one rank: results, several checkpoints, files that exist."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
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
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.load import open_reader, shape_of
from megatron_chameleon.corpus.indexed import IndexedWriter, open_tokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.perplexity import (
    evaluate_perplexities,
    evaluate_perplexity,
    scored_text,
)
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.parallel.layout import distributed
from tests.small_corpus import word_tokenizer, write_small_corpus
from tests.unit.evaluation.plain_protocol import Prediction, predictions
from tests.unit.poison import poison_checkpoint


@pytest.fixture(scope="module")
def expected_losses(corpus, finished_run):
    """Loss per domain of the test split by a plain loop, one window of 32 tokens at a time."""
    losses = {}
    with distributed(ParallelOptions(), seed=0) as layout:
        reader = open_reader(CheckpointRecord.load(find_checkpoint(finished_run)), layout)
        for name in corpus.names:
            stream = open_tokens(corpus, name, "test").tokens[:].astype(np.int64)
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


def losses_by_document(corpus, finished_run, name, protocol):
    """Sums of losses and tokens of each test document by a plain loop over the protocol."""
    stream = open_tokens(corpus, name, "test")
    documents = [stream.get(i).tolist() for i in range(len(stream))]
    sums, tokens = np.zeros(len(documents)), np.zeros(len(documents), int)
    with distributed(ParallelOptions(), seed=0) as layout:
        reader = open_reader(CheckpointRecord.load(find_checkpoint(finished_run)), layout)
        eod = corpus.tokenizer.eod_id
        for window in in_windows(predictions(documents, protocol, eod)):
            given = window[-1].context
            labels = torch.tensor([[*given[1:], window[-1].label]])
            losses = reader.token_losses(torch.tensor([given]), labels)
            assert losses is not None
            for one in window:
                sums[one.document] += float(losses[0, len(one.context) - 1])
                tokens[one.document] += 1
    return sums, tokens


def in_windows(scored):
    """Predictions in lists whose contexts are each the beginning of the last one's."""
    windows: list[list[Prediction]] = []
    for one in scored:
        before = windows[-1][-1].context if windows else one.context
        goes_on = windows and one.context[: len(before)] == before != one.context
        windows[-1].append(one) if goes_on else windows.append([one])
    return windows


@pytest.mark.parametrize(
    ("changes", "protocol"),
    [
        ({}, Protocol("test", 32)),
        ({"overlap": 24}, Protocol("test", 32, overlap=24)),
        (
            {"packing": "documents"},
            Protocol("test", 32, packing="documents", first_token="after-eod"),
        ),
        (
            {
                "packing": "documents",
                "overlap": 7,
                "first_token": "not-scored",
                "score_end_of_document": False,
                "window_length": 20,
            },
            Protocol("test", 20, packing="documents", end_of_document=False, overlap=7),
        ),
    ],
)
def test_loss_and_standard_error_are_those_of_the_documents(
    evaluate, corpus, finished_run, changes, protocol
):
    result = evaluate(**changes)
    assert result.protocol == protocol
    sums, tokens = losses_by_document(corpus, finished_run, "code", protocol)
    domain = result.domains["code"]
    assert domain.tokens == tokens.sum()
    assert domain.loss == pytest.approx(sums.sum() / tokens.sum(), abs=1e-6)
    residuals = sums - domain.loss * tokens
    count = len(tokens)
    variance = count / (count - 1) * (residuals**2).sum() / tokens.sum() ** 2
    assert domain.loss_error == pytest.approx(math.sqrt(variance), rel=1e-4)
    assert domain.perplexity_error == pytest.approx(domain.perplexity * math.sqrt(variance))


@pytest.mark.parametrize("place", ["in the corpus", "where the checkpoint says"])
def test_bits_per_byte_are_by_the_bytes_of_the_text(
    evaluate, corpus, trained_run, tmp_path, capsys, place
):
    """A tokenizer whose tokens are numbers: their digits, and a space before each."""
    without = evaluate()
    root = Path(shutil.copytree(corpus.root, tmp_path / "corpus"))
    own = word_tokenizer(root / "tokenizer.json")
    identity = dataclasses.replace(corpus.tokenizer, sha256=sha256_of_files(own))
    dataclasses.replace(corpus, root=root, tokenizer=identity).save()
    record = CheckpointRecord.load(find_checkpoint(trained_run))
    if place == "where the checkpoint says":
        (tmp_path / "elsewhere").mkdir()
        own.rename(tmp_path / "elsewhere" / "tokenizer.json")
    options = {"corpus": str(tmp_path / "elsewhere")}
    made = dataclasses.replace(record.provenance, options=options)
    dataclasses.replace(record, tokenizer_hash=identity.sha256, provenance=made).save()
    capsys.readouterr()
    result = evaluate(corpus=root, checkpoint=trained_run)
    assert "no bits per byte" not in capsys.readouterr().out
    for name, domain in result.domains.items():
        first, *others = open_tokens(corpus, name, "test").tokens[:].tolist()
        sizes = [0 if t == corpus.tokenizer.eod_id else len(f" {t}") for t in (first, *others)]
        scale = corpus.domains[name].test.text_bytes / sum(sizes)
        assert domain.loss == pytest.approx(without.domains[name].loss)
        assert domain.text_bytes == pytest.approx(scale * sum(sizes[1:]), abs=0.5)
        bits = domain.loss * domain.tokens / math.log(2)
        assert domain.bits_per_byte == pytest.approx(bits / domain.text_bytes)


def test_the_unigram_model_is_that_of_the_domains_own_training_text(evaluate, corpus):
    vocab_size = corpus.tokenizer.vocab_size
    for name, domain in evaluate().domains.items():
        training = open_tokens(corpus, name, "train").tokens[:].tolist()
        labels = open_tokens(corpus, name, "test").tokens[:].tolist()[1:]
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


def test_an_earlier_checkpoint_and_another_split_can_be_chosen(evaluate, finished_run, corpus):
    result = evaluate(checkpoint=finished_run / "checkpoints" / "step-00000003", split="valid")
    assert result.step == 3
    assert {d.tokens for d in result.domains.values()} == {
        domain.valid.tokens - 1 for domain in corpus.domains.values()
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"window_length": 33}, "--window-length 33: the model has positions for 1 to 32 tokens"),
        ({"window_length": 0}, "--window-length 0"),
        ({"max_tokens": 31}, "--max-tokens 31 is less than one window of 32 tokens"),
        ({"overlap": 32}, "--overlap 32: must be from 0 to 31"),
        ({"overlap": -1}, "--overlap -1: "),
        ({"window_length": 8, "overlap": 8}, "--overlap 8: must be from 0 to 7"),
        ({"first_token": "after-eod"}, "--first-token after-eod is for --packing documents"),
        ({"evaluation_batch_size": 0}, "--evaluation-batch-size 0: "),
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


def without_test_text(root, names, left=0):
    """A small corpus in which some domains have ``left`` tokens in their test split."""
    corpus = write_small_corpus(root)
    domains = dict(corpus.domains)
    for name in names:
        prefix = corpus.prefix(name, "test")
        for suffix in (".bin", ".idx"):
            Path(f"{prefix}{suffix}").unlink()
        writer = IndexedWriter(prefix, corpus.dtype)
        for _ in range(left):
            writer.add(np.zeros(1, np.int32))
        writer.finish()
        empty = dataclasses.replace(
            domains[name].test, documents=left, tokens=left, block_checksums=None
        )
        domains[name] = dataclasses.replace(domains[name], test=empty)
    dataclasses.replace(corpus, domains=domains).save()
    return Corpus.load(corpus.root)


@pytest.mark.parametrize("left", [0, 1])
def test_a_split_with_nothing_to_predict_is_told_and_the_others_go_on(
    evaluate, tmp_path, capsys, left
):
    everything = evaluate().domains
    corpus = without_test_text(tmp_path / "corpus", ["code"], left)
    with pytest.warns(UserWarning, match="nothing to predict in the test split of code: left out"):
        result = evaluate(corpus=corpus.root)
    assert result.left_out == ["code"]
    assert result.domains == {n: everything[n] for n in ("news", "poems")}
    assert result.mean_perplexity == pytest.approx(
        (everything["news"].perplexity + everything["poems"].perplexity) / 2
    )
    assert "nothing to predict, and not in the average: code" in capsys.readouterr().out
    assert EvaluationResult.load(tmp_path / "result.json") == result


def test_a_corpus_with_nothing_to_predict_is_refused(evaluate, tmp_path):
    corpus = without_test_text(tmp_path / "corpus", ["news", "code", "poems"])
    with pytest.raises(UserError, match=r"no domain has anything to predict in its test .*--split"):
        evaluate(corpus=corpus.root)
    assert not (tmp_path / "result.json").exists()


def test_a_model_that_has_diverged_is_told_and_nothing_is_written(evaluate, trained_run, tmp_path):
    poison_checkpoint(find_checkpoint(trained_run), "decoder.layers.1.mlp.linear_fc2.bias")
    with pytest.raises(UserError, match="loss on domain 'news' is nan: the model has diverged"):
        evaluate(checkpoint=trained_run)
    assert not (tmp_path / "result.json").exists()


@pytest.fixture
def two_checkpoints(perplexity_options, finished_run, tmp_path):
    """The evaluation of an earlier checkpoint of the finished run, and that of its last one."""
    earlier = dataclasses.replace(
        perplexity_options,
        checkpoint=finished_run / "checkpoints" / "step-00000003",
        output=tmp_path / "earlier.json",
    )
    return [earlier, perplexity_options]


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


@pytest.fixture
def calls(monkeypatch):
    """The steps of the checkpoints whose models are opened from here on."""
    opened: list[int] = []

    def open_and_note(record, layout):
        opened.append(record.step)
        return open_reader(record, layout)

    monkeypatch.setattr("megatron_chameleon.evaluation.perplexity.open_reader", open_and_note)
    return opened


def test_an_interrupted_command_goes_on_with_what_is_missing(two_checkpoints, calls, capsys):
    going_on = [dataclasses.replace(options, overwrite=False) for options in two_checkpoints]
    first = evaluate_perplexity(going_on[0])
    again = evaluate_perplexities(going_on)
    assert calls == [3, 6]
    assert again[0] == first
    assert f"{going_on[0].output} was there already; --overwrite" in capsys.readouterr().out
    evaluate_perplexities(two_checkpoints)
    assert calls == [3, 6, 3, 6]


@pytest.mark.parametrize(
    "changes",
    [{"split": "valid"}, {"max_tokens": 64}, {"checkpoint": "earlier"}, {"corpus": "other"}],
)
def test_a_result_of_something_else_is_replaced(evaluate, finished_run, tmp_path, calls, changes):
    evaluate()
    places = {
        "earlier": finished_run / "checkpoints" / "step-00000003",
        "other": write_small_corpus(tmp_path / "other", seed=1).root,
    }
    changes = {key: places.get(value, value) for key, value in changes.items()}
    found = evaluate(overwrite=False, **changes)
    assert len(calls) == 2
    assert EvaluationResult.load(tmp_path / "result.json") == found


def test_a_damaged_result_is_replaced(evaluate, tmp_path):
    (tmp_path / "result.json").write_text('{"kind": "evaluation", "format_version": 1}')
    found = evaluate(overwrite=False)
    assert EvaluationResult.load(tmp_path / "result.json") == found


def test_checkpoints_of_one_corpus_share_what_is_known_of_its_text(two_checkpoints, monkeypatch):
    read: list[str] = []

    def note(corpus, name, *more):
        read.append(name)
        return scored_text(corpus, name, *more)

    monkeypatch.setattr("megatron_chameleon.evaluation.perplexity.scored_text", note)
    evaluate_perplexities(two_checkpoints)
    assert read == ["news", "code", "poems"]


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


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("folder", "folder is a folder; give the name of a file"),
        ("mixture.json", r"mixture\.json .*'mixture'"),
        ("mixture.json/result.json", r"mixture\.json cannot be written to; choose another folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_told_before_the_first_is_evaluated(
    two_checkpoints, tmp_path, calls, output, problem
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "mixture.json").write_text(json.dumps({"kind": "mixture"}))
    first, last = two_checkpoints
    with pytest.raises(UserError, match=problem):
        evaluate_perplexities([first, dataclasses.replace(last, output=tmp_path / output)])
    assert calls == []
    assert json.loads((tmp_path / "mixture.json").read_text()) == {"kind": "mixture"}
