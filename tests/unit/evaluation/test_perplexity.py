"""Compare windows over held-out text, and tools/evaluate.py perplexity, with plain loops."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    EvaluationResult,
    Protocol,
    find_checkpoint,
)
from megatron_chameleon.artifacts.evaluation_result import MAX_CLUSTERS
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.open_model import CheckpointModel, open_model
from megatron_chameleon.cli import parse_options
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.indexed import IndexedWriter
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation import perplexity
from megatron_chameleon.evaluation.held_out import (
    choose_windows,
    cut_windows,
    held_out_text,
    spread_evenly,
)
from megatron_chameleon.evaluation.options import PerplexityOptions, PerplexityToolOptions
from megatron_chameleon.evaluation.perplexity import (
    cluster_ends,
    evaluate_perplexities,
    token_counts,
)
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.model.readout import length_batches
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from tests.small_corpus import word_tokenizer, write_small_corpus
from tests.unit.evaluation.plain_protocol import DOCUMENTS, EOD, predictions, protocols, token_file
from tests.unit.poison import poison_checkpoint


@pytest.fixture
def perplexity_options(corpus, finished_run, tmp_path):
    """Options of one evaluation of the finished run."""
    output = tmp_path / "result.json"
    return PerplexityOptions(
        corpus=corpus.root, checkpoint=finished_run, output=output, overwrite=True
    )


@pytest.fixture
def evaluate(perplexity_options):
    """``evaluate(**changes)``: the result of one evaluation of the finished run."""
    return lambda **changes: evaluate_perplexities(
        [dataclasses.replace(perplexity_options, **changes)]
    )[0]


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=10).filter(any),
    st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
    st.integers(1, 200),
)
def test_chosen_windows_fit_the_limit_and_are_evenly_spaced(sizes, window, more):
    ends = np.cumsum(sizes)
    windows = cut_windows(ends - sizes, np.array(sizes), *window)
    max_tokens = window[0] + more
    chosen = spread_evenly(windows, max_tokens)
    if ends[-1] <= max_tokens:
        assert chosen is windows
        return
    places = np.searchsorted(windows.begin, chosen.begin)
    assert len(set(places.tolist())) == len(chosen) >= 1
    assert np.array_equal(windows.end[places], chosen.end)
    assert chosen.num_scored.sum() <= max_tokens
    if len(chosen) > 1:
        assert places[0] == 0
        assert places[-1] == len(windows) - 1
        assert np.diff(places).max() - np.diff(places).min() <= 1


def scored(text, batch_size):
    """Yield (context, label) of every token that the batches of ``text`` score."""
    lengths, longest = text.windows.lengths.tolist(), text.window_length
    for first, last, width in length_batches(lengths, batch_size * longest, 1, longest):
        tokens, labels, mask, _ = text.arrays(first, last, width)
        assert tokens.shape == labels.shape == mask.shape == (last - first, width)
        for row, place in np.argwhere(mask):
            yield tuple(tokens[row, : place + 1].tolist()), int(labels[row, place])


@given(DOCUMENTS, protocols(), st.integers(1, 7))
def test_every_token_is_scored_once_with_the_context_of_the_protocol(
    documents, protocol, batch_size
):
    expected = [(one.context, one.label) for one in predictions(documents, protocol)]
    text = held_out_text(token_file(documents), protocol, EOD)
    assert (text is None) == (expected == [])
    if text is not None:
        in_order = [label for _, labels in text.scored_blocks() for label in labels]
        assert in_order == [label for _, label in expected]
        assert sorted(scored(text.longest_first(), batch_size)) == sorted(expected)


def parse(line):
    return parse_options(PerplexityToolOptions, ["--corpus", "c", *line.split()]).one_by_one()


def test_several_checkpoints_are_evaluated_with_the_same_options():
    found = parse("--output a.json --checkpoint a b --output b.json --overlap 16")
    assert [(str(o.checkpoint), str(o.output)) for o in found] == [("a", "a.json"), ("b", "b.json")]
    assert {o.overlap for o in found} == {16}
    with pytest.raises(UserError, match="--output"):
        parse("--checkpoint a b --output x.json x.json")


def losses_by_document(corpus, finished_run, name, protocol):
    """Compute each test document's loss sum and token count by a plain loop, one row per token."""
    stream = open_domains(corpus).open(name, "test")
    documents = [stream.get(i).tolist() for i in range(len(stream))]
    sums, tokens = np.zeros(len(documents)), np.zeros(len(documents), int)
    scored = predictions(documents, protocol, corpus.tokenizer.eod_id)
    inputs = torch.zeros(len(scored), protocol.window_length, dtype=torch.int64)
    labels = inputs.clone()
    for row, one in enumerate(scored):
        inputs[row, : len(one.context)] = torch.tensor(one.context)
        labels[row, len(one.context) - 1] = one.label
    with distributed(ParallelOptions(), seed=0) as layout:
        reader = open_model(finished_run).reader(layout)
        losses = reader.token_losses(inputs, labels)
    assert losses is not None
    for row, one in enumerate(scored):
        sums[one.document] += float(losses[row, len(one.context) - 1])
        tokens[one.document] += 1
    return sums, tokens


SEPARATE = {"packing": "documents", "overlap": 7, "window_length": 20}


@pytest.mark.parametrize(
    ("options", "protocol"),
    [
        ({}, {}),
        ({"overlap": 24, "evaluation_batch_size": 1}, {"overlap": 24}),
        ({"packing": "documents"}, {"packing": "documents", "first_token": "after-eod"}),
        (
            {**SEPARATE, "first_token": "not-scored", "score_end_of_document": False},
            {**SEPARATE, "end_of_document": False},
        ),
    ],
)
def test_loss_and_standard_error_equal_a_plain_loop(
    evaluate, corpus, finished_run, options, protocol
):
    result = evaluate(**options)
    protocol = Protocol(**{"split": "test", "window_length": 32, **protocol})
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


def test_bits_per_byte_use_the_bytes_of_the_text(evaluate, corpus, trained_run, tmp_path):
    """Each token is a number; its text is a space followed by the digits of the number."""
    with pytest.warns(UserWarning, match="no bits per byte"):
        without = evaluate()
    root = Path(shutil.copytree(corpus.root, tmp_path / "corpus"))
    own = word_tokenizer(root / "tokenizer.json")
    identity = dataclasses.replace(corpus.tokenizer, sha256=sha256_of_files(own))
    dataclasses.replace(corpus, root=root, tokenizer=identity).save()
    record = CheckpointRecord.load(find_checkpoint(trained_run))
    dataclasses.replace(record, tokenizer_hash=identity.sha256).save()
    result = evaluate(corpus=root, checkpoint=trained_run)
    for name, domain in result.domains.items():
        first, *others = open_domains(corpus).open(name, "test").tokens[:].tolist()
        sizes = [0 if t == corpus.tokenizer.eod_id else len(f" {t}") for t in (first, *others)]
        scale = corpus.domains[name].test.text_bytes / sum(sizes)
        assert domain.loss == pytest.approx(without.domains[name].loss)
        assert domain.text_bytes == pytest.approx(scale * sum(sizes[1:]), abs=0.5)
        bits = domain.loss * domain.tokens / math.log(2)
        assert domain.bits_per_byte == pytest.approx(bits / domain.text_bytes)


def test_unigram_model_is_fitted_to_the_training_text(evaluate, corpus):
    vocab_size = corpus.tokenizer.vocab_size
    for name, domain in evaluate(max_tokens=64).domains.items():
        training = open_domains(corpus).open(name, "train").tokens[:].tolist()
        text = choose_windows(open_domains(corpus).open(name, "test").tokens, 32, max_tokens=64)
        ((_, labels),) = text.scored_blocks()
        expected = [
            -math.log((training.count(label) + 1) / (len(training) + vocab_size))
            for label in labels.tolist()
        ]
        assert domain.unigram_loss == pytest.approx(sum(expected) / len(labels), rel=1e-9)


def test_several_checkpoints_are_evaluated_and_an_interrupted_command_resumes(
    perplexity_options, finished_run, monkeypatch
):
    opened: list[int] = []

    def recorded_open(model, layout):
        opened.append(model.step)
        return open_reader(model, layout)

    open_reader = CheckpointModel.reader
    monkeypatch.setattr(CheckpointModel, "reader", recorded_open)
    last = dataclasses.replace(perplexity_options, overwrite=False, max_tokens=64)
    step = finished_run / "checkpoints" / "step-00000003"
    output = last.output.parent / "deeper" / "earlier.json"
    earlier = dataclasses.replace(last, checkpoint=step, output=output)
    (first,) = evaluate_perplexities([earlier])
    results = evaluate_perplexities([earlier, last])
    assert opened == [3, 6]
    assert results[0] == first
    assert results == [EvaluationResult.load(each.output) for each in (earlier, last)]
    shape = open_model(finished_run).config
    assert results[1].cost.flops == forward_flops(shape, 3 * 64, 32)
    for changes in ({"max_tokens": 96}, {"checkpoint": step}, {"overwrite": True}):
        (found,) = evaluate_perplexities([dataclasses.replace(last, **changes)])
        assert EvaluationResult.load(last.output) == found
    again = dataclasses.replace(last, overwrite=True)
    # The error is raised before the first evaluation starts.
    with pytest.raises(UserError, match="--overlap 32"):
        evaluate_perplexities([again, dataclasses.replace(again, overlap=32)])
    assert len(opened) == 5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"window_length": 33}, "--window-length 33"),
        ({"max_tokens": 31}, "--max-tokens 31"),
        ({"checkpoint": Path("nowhere")}, "--checkpoint nowhere"),
        ({"parallel": ParallelOptions(2)}, r"1 rank\(s\) cannot be laid out as tensor 2"),
    ],
)
def test_invalid_options_are_rejected_before_anything_is_written(
    evaluate, tmp_path, changes, problem
):
    with pytest.raises(UserError, match=problem):
        evaluate(**changes)
    assert list(tmp_path.iterdir()) == []


def with_one_test_token(root, names):
    """Make a small corpus in which the test split of each of ``names`` has one token."""
    corpus = write_small_corpus(root)
    domains = dict(corpus.domains)
    for name in names:
        prefix = Path(corpus.prefix(name, "test"))
        for suffix in (".bin", ".idx", ".xxh3"):
            Path(f"{prefix}{suffix}").unlink()
        writer = IndexedWriter(prefix, corpus.dtype)
        writer.add(np.zeros(1, np.int32))
        writer.finish()
        short = dataclasses.replace(domains[name].test, documents=1, tokens=1, block_checksums=None)
        domains[name] = dataclasses.replace(domains[name], test=short)
    dataclasses.replace(corpus, domains=domains).save()
    return corpus.root


def test_domain_with_nothing_to_predict_is_left_out(evaluate, tmp_path, capsys):
    everything = evaluate().domains
    root = with_one_test_token(tmp_path / "corpus", ["code"])
    with pytest.warns(UserWarning, match="test split of code"):
        result = evaluate(corpus=root)
    assert result.left_out == ["code"]
    assert result.domains == {n: everything[n] for n in ("news", "poems")}
    assert result.mean_perplexity == pytest.approx(
        (everything["news"].perplexity + everything["poems"].perplexity) / 2
    )
    assert "not in the average: code" in capsys.readouterr().out
    assert EvaluationResult.load(tmp_path / "result.json") == result
    nothing = with_one_test_token(tmp_path / "nothing", ["news", "code", "poems"])
    with pytest.raises(UserError, match="test split"):
        evaluate(corpus=nothing)


def test_diverged_model_is_rejected(evaluate, trained_run, tmp_path):
    poison_checkpoint(find_checkpoint(trained_run), "decoder.layers.1.mlp.linear_fc2.bias")
    with pytest.raises(UserError, match="'news' is nan"):
        evaluate(checkpoint=trained_run)
    assert not (tmp_path / "result.json").exists()


def test_neighbouring_documents_share_a_cluster():
    tokens = token_file([[1, 2, EOD]] * 1000)
    text = choose_windows(tokens.tokens, 7, max_tokens=14)
    ends = cluster_ends(tokens, text)
    ((positions, _),) = text.scored_blocks()
    assert len(ends) == min(len(np.unique(positions // 3)), MAX_CLUSTERS)
    counts = np.bincount(np.searchsorted(ends, positions, side="right"))
    assert len(counts) == len(ends)
    assert counts.max() - counts.min() <= 3


def test_tokens_of_a_long_stream_are_counted_in_spaced_chunks(monkeypatch):
    monkeypatch.setattr(perplexity, "_CHUNK", 10)
    stream = np.arange(95)
    assert token_counts(stream, 95).tolist() == [1] * 95
    assert token_counts(stream, 95, 200).tolist() == [1] * 95
    counted = np.flatnonzero(token_counts(stream, 95, 30))
    assert counted.tolist() == [*range(10), *range(30, 40), *range(60, 70)]
