"""tools/evaluate.py perplexity on one rank, and its sums against plain loops."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Corpus,
    EvaluationResult,
    Protocol,
    find_checkpoint,
)
from megatron_chameleon.artifacts.evaluation_result import MAX_CLUSTERS
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.load import open_reader, shape_of
from megatron_chameleon.corpus.indexed import IndexedWriter, open_tokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.held_out import choose_windows, held_out_text, reading_flops
from megatron_chameleon.evaluation.perplexity import (
    ClusterMap,
    cluster_losses,
    evaluate_perplexities,
    evaluate_perplexity,
    scored_text,
)
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from tests.small_corpus import word_tokenizer, write_small_corpus
from tests.unit.evaluation.plain_protocol import (
    DOCUMENTS,
    EOD,
    Prediction,
    predictions,
    protocols,
    token_file,
)
from tests.unit.poison import poison_checkpoint


def losses_by_document(corpus, finished_run, name, protocol):
    """Sums of losses and tokens of each test document by a plain loop over the protocol."""
    stream = open_tokens(corpus, name, "test")
    documents = [stream.get(i).tolist() for i in range(len(stream))]
    sums, tokens = np.zeros(len(documents)), np.zeros(len(documents), int)
    with distributed(ParallelOptions(), seed=0) as layout:
        reader = open_reader(CheckpointRecord.load(find_checkpoint(finished_run)), layout)
        eod = corpus.tokenizer.eod_id
        for window in in_windows(predictions(documents, protocol, eod)):
            context = window[-1].context
            labels = torch.tensor([[*context[1:], window[-1].label]])
            losses = reader.token_losses(torch.tensor([context]), labels)
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
        continues = windows and one.context[: len(before)] == before != one.context
        windows[-1].append(one) if continues else windows.append([one])
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
def test_loss_and_standard_error_equal_a_plain_loop(
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
def test_bits_per_byte_use_the_bytes_of_the_text(
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


def test_unigram_model_is_fitted_to_the_training_text(evaluate, corpus):
    vocab_size = corpus.tokenizer.vocab_size
    for name, domain in evaluate().domains.items():
        training = open_tokens(corpus, name, "train").tokens[:].tolist()
        labels = open_tokens(corpus, name, "test").tokens[:].tolist()[1:]
        expected = [
            -math.log((training.count(label) + 1) / (len(training) + vocab_size))
            for label in labels
        ]
        assert domain.unigram_loss == pytest.approx(sum(expected) / len(labels), rel=1e-9)


def test_result_records_inputs_protocol_and_cost(evaluate, corpus, finished_run, tmp_path):
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


def test_earlier_checkpoint_and_other_split(evaluate, finished_run, corpus):
    result = evaluate(checkpoint=finished_run / "checkpoints" / "step-00000003", split="valid")
    assert result.step == 3
    assert {d.tokens for d in result.domains.values()} == {
        domain.valid.tokens - 1 for domain in corpus.domains.values()
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"window_length": 33}, "--window-length 33"),
        ({"max_tokens": 31}, "--max-tokens 31"),
        ({"overlap": 32}, "--overlap 32"),
        ({"overlap": -1}, "--overlap -1: "),
        ({"first_token": "after-eod"}, "--first-token after-eod"),
        ({"evaluation_batch_size": 0}, "--evaluation-batch-size 0: "),
        ({"checkpoint": Path("nowhere")}, "--checkpoint nowhere"),
        ({"corpus": Path("nowhere")}, r"nowhere/corpus\.json does not exist"),
        ({"parallel": ParallelOptions(2)}, r"1 rank\(s\) cannot be laid out as tensor 2"),
    ],
)
def test_mistakes_are_rejected_and_nothing_is_written(evaluate, tmp_path, changes, problem):
    with pytest.raises(UserError, match=problem):
        evaluate(**changes)
    assert list(tmp_path.iterdir()) == []


def test_other_tokenizer_is_rejected(evaluate, tmp_path):
    other = write_small_corpus(tmp_path / "other", tokenizer_hash="9" * 64)
    with pytest.raises(UserError, match="tokenizer"):
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


def test_domain_with_nothing_to_predict_is_left_out(evaluate, tmp_path, capsys):
    everything = evaluate().domains
    corpus = without_test_text(tmp_path / "corpus", ["code"], left=1)
    with pytest.warns(UserWarning, match="test split of code"):
        result = evaluate(corpus=corpus.root)
    assert result.left_out == ["code"]
    assert result.domains == {n: everything[n] for n in ("news", "poems")}
    assert result.mean_perplexity == pytest.approx(
        (everything["news"].perplexity + everything["poems"].perplexity) / 2
    )
    assert "not in the average: code" in capsys.readouterr().out
    assert EvaluationResult.load(tmp_path / "result.json") == result


def test_corpus_with_nothing_to_predict_is_rejected(evaluate, tmp_path):
    corpus = without_test_text(tmp_path / "corpus", ["news", "code", "poems"])
    with pytest.raises(UserError, match="test split"):
        evaluate(corpus=corpus.root)
    assert not (tmp_path / "result.json").exists()


def test_diverged_model_is_rejected(evaluate, trained_run, tmp_path):
    poison_checkpoint(find_checkpoint(trained_run), "decoder.layers.1.mlp.linear_fc2.bias")
    with pytest.raises(UserError, match="'news' is nan"):
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


def test_several_checkpoints_equal_each_alone(two_checkpoints, capsys):
    found = evaluate_perplexities(two_checkpoints)
    printed = capsys.readouterr().out
    assert [result.step for result in found] == [3, 6]
    for options, result in zip(two_checkpoints, found, strict=True):
        assert EvaluationResult.load(options.output) == result
        assert f"written to {options.output}; " in printed
        alone = evaluate_perplexity(options)
        assert result.domains == alone.domains
        assert result.provenance.options == alone.provenance.options
        assert result.provenance.inputs == alone.provenance.inputs
        assert result.cost.flops == alone.cost.flops


@pytest.fixture
def opened_steps(monkeypatch):
    """Steps of the checkpoints opened so far."""
    opened: list[int] = []

    def recorded_open(record, layout):
        opened.append(record.step)
        return open_reader(record, layout)

    monkeypatch.setattr("megatron_chameleon.evaluation.perplexity.open_reader", recorded_open)
    return opened


def test_interrupted_command_resumes(two_checkpoints, opened_steps, capsys):
    resumed = [dataclasses.replace(options, overwrite=False) for options in two_checkpoints]
    first = evaluate_perplexity(resumed[0])
    again = evaluate_perplexities(resumed)
    assert opened_steps == [3, 6]
    assert again[0] == first
    assert "--overwrite" in capsys.readouterr().out
    evaluate_perplexities(two_checkpoints)
    assert opened_steps == [3, 6, 3, 6]


@pytest.mark.parametrize(
    "changes",
    [{"max_tokens": 64}, {"checkpoint": "earlier"}, {"corpus": "other"}],
)
def test_result_of_other_inputs_is_replaced(
    evaluate, finished_run, tmp_path, opened_steps, changes
):
    evaluate()
    places = {
        "earlier": finished_run / "checkpoints" / "step-00000003",
        "other": write_small_corpus(tmp_path / "other", seed=1).root,
    }
    changes = {key: places.get(value, value) for key, value in changes.items()}
    found = evaluate(overwrite=False, **changes)
    assert len(opened_steps) == 2
    assert EvaluationResult.load(tmp_path / "result.json") == found


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("folder", "folder is a folder"),
        ("mixture.json", r"mixture\.json .*'mixture'"),
        ("mixture.json/result.json", r"mixture\.json cannot be written to; choose another folder"),
    ],
)
def test_unwritable_output_is_rejected_before_the_first_evaluation(
    two_checkpoints, tmp_path, opened_steps, output, problem
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "mixture.json").write_text(json.dumps({"kind": "mixture"}))
    first, last = two_checkpoints
    with pytest.raises(UserError, match=problem):
        evaluate_perplexities([first, dataclasses.replace(last, output=tmp_path / output)])
    assert opened_steps == []
    assert json.loads((tmp_path / "mixture.json").read_text()) == {"kind": "mixture"}


SHAPE = ModelShape(model_size("nano"), vocab_size=250, max_sequence_length=32)


@dataclasses.dataclass
class LabelReader:
    """In place of a model: the loss of a token is a number that stands for it alone."""

    data_rank: int = 0
    data_size: int = 1
    has_result: bool = True

    @property
    def layout(self) -> Any:
        return SimpleNamespace(
            data_rank=self.data_rank,
            data_size=self.data_size,
            tensor_size=2,
            sequence_parallel=False,
            device=torch.device("cpu"),
            is_last_stage=self.has_result,
        )

    def token_losses(self, tokens, labels):
        return torch.sqrt(labels.float() + 2) if self.has_result else None

    def sum_over_ranks(self, values, *, has_result):
        assert has_result == self.has_result
        return values


def sums_of(reader, tokens, text, batch_size):
    with tqdm(total=text.num_predictions, disable=True) as progress:
        updates: list[int] = []
        progress.update = updates.append
        sums = cluster_losses(reader, text, ClusterMap.of(tokens, text), batch_size, progress)
    assert sum(updates) == text.num_predictions  # the bar ends where it should
    return sums


@given(DOCUMENTS, protocols(), st.integers(1, 7), st.integers(1, 4))
def test_losses_are_summed_by_document_on_any_number_of_ranks(
    documents, protocol, batch_size, data_size
):
    tokens = token_file(documents)
    text = held_out_text(tokens, protocol, EOD)
    if text is None:
        return
    parts = [
        sums_of(LabelReader(rank, data_size), tokens, text, batch_size) for rank in range(data_size)
    ]
    expected = np.zeros(len(documents))
    for one in predictions(documents, protocol):
        expected[one.document] += np.sqrt(np.float32(one.label + 2))
    found = np.sum(parts, axis=0)
    assert found[found > 0] == pytest.approx(expected[expected > 0], rel=1e-12)


def test_flops_depend_on_the_windows_lengths():
    text = choose_windows(np.zeros(2 * 16 + 5 + 1, np.uint16), 16, overlap=0)
    expected = 2 * forward_flops(SHAPE, 16, 16) + forward_flops(SHAPE, 5, 5)
    assert reading_flops(SHAPE, text) == expected
    assert expected != forward_flops(SHAPE, 37, 16)


@pytest.fixture(scope="module")
def reader(one_rank):
    model = build_model(SHAPE, one_rank, seed=3)
    model.eval()
    return Reader(model, SHAPE, one_rank)


def loss_of(reader: Reader, context: tuple[int, ...], label: int) -> float:
    """Of one token, by the logits of its own context alone, its softmax in float64."""
    tokens = torch.tensor([context])
    with torch.no_grad():
        logits = reader.model(tokens, torch.arange(len(context))[None], None)
    return -float(logits[0, -1, : SHAPE.vocab_size].double().log_softmax(-1)[label])


PROTOCOLS = [
    Protocol("test", 32),
    Protocol("test", 13, overlap=5),
    Protocol("test", 16, packing="documents", overlap=15),
    Protocol("test", 9, packing="documents", overlap=4, first_token="after-eod"),
    Protocol("test", 32, packing="documents", end_of_document=False, first_token="after-eod"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: f"{p.packing}-{p.window_length}")
def test_losses_of_a_model_equal_those_of_each_token_alone(reader, protocol):
    rng = np.random.default_rng(protocol.window_length)
    lengths = (1, 50, 2, 0, 33, 7)
    documents = [[*rng.integers(10, 250, n - 1).tolist(), EOD] if n else [] for n in lengths]
    expected = np.zeros(len(documents))
    for one in predictions(documents, protocol):
        expected[one.document] += loss_of(reader, one.context, one.label)
    tokens = token_file(documents)
    text = held_out_text(tokens, protocol, EOD)
    assert text is not None
    for batch_size in (1, 3, 64):
        found = sums_of(reader, tokens, text, batch_size)
        assert found[found > 0] == pytest.approx(expected[expected > 0], abs=2e-5)


@given(DOCUMENTS, protocols())
def test_each_scored_document_is_a_cluster(documents, protocol):
    tokens = token_file(documents)
    text = held_out_text(tokens, protocol, EOD)
    scored = [one.document for one in predictions(documents, protocol)]
    if text is None:
        return
    clusters = ClusterMap.of(tokens, text)
    found = [c for positions, _ in text.scored_blocks() for c in clusters.at(positions).tolist()]
    # The same numbers for the same documents, in their order.
    order = {document: i for i, document in enumerate(sorted(set(scored)))}
    renumbered = {cluster: i for i, cluster in enumerate(sorted(set(found)))}
    assert [renumbered[place] for place in found] == [order[document] for document in scored]
    assert all(0 <= place < clusters.count for place in found)


@pytest.mark.parametrize("documents", [MAX_CLUSTERS, 1000])
def test_neighbours_of_many_documents_share_a_cluster(documents):
    tokens = token_file([[1, 2, EOD]] * documents)
    text = choose_windows(tokens.tokens, 7)
    clusters = ClusterMap.of(tokens, text)
    assert clusters.count == MAX_CLUSTERS
    found = clusters.at(np.arange(3 * documents))
    assert np.all(np.diff(found) >= 0)
    counts = np.bincount(found) // 3
    assert len(counts) == MAX_CLUSTERS
    assert counts.max() - counts.min() <= 1


def test_documents_left_out_are_in_no_cluster():
    tokens = token_file([[1] * 9 + [EOD]] * 20)
    text = choose_windows(tokens.tokens, 10, max_tokens=40)
    clusters = ClusterMap.of(tokens, text)
    ((positions, _),) = text.scored_blocks()
    documents = np.unique(positions // 10)
    assert clusters.count == len(documents) < 20
    assert np.unique(clusters.at(positions)).tolist() == list(range(clusters.count))


@pytest.fixture(scope="module")
def sized_corpus(tmp_path_factory):
    """A small sized_corpus whose text has twice the bytes that its tokens decode to."""
    root = tmp_path_factory.mktemp("bytes")
    tokenizer = word_tokenizer(root / "tokenizer.json")
    corpus = write_small_corpus(root, tokenizer_hash=sha256_of_files(tokenizer))
    sizes = token_bytes_of(corpus)
    domains = {
        name: dataclasses.replace(
            domain,
            test=dataclasses.replace(
                domain.test,
                text_bytes=2 * int(sizes[open_tokens(corpus, name, "test").tokens[:]].sum()),
            ),
        )
        for name, domain in corpus.domains.items()
    }
    dataclasses.replace(corpus, domains=domains).save()
    return Corpus.load(root)


def token_bytes_of(corpus: Corpus) -> np.ndarray:
    """Each token is a number in digits, with a space; the end-of-document token is nothing."""
    sizes = [len(str(token)) + 1 for token in range(corpus.tokenizer.vocab_size)]
    sizes[corpus.tokenizer.eod_id] = 0
    return np.array(sizes, np.int32)


@pytest.mark.parametrize("max_tokens", [None, 64])
def test_tokens_and_bytes_are_counted_by_cluster(sized_corpus, max_tokens):
    tokens = open_tokens(sized_corpus, "code", "test")
    text = choose_windows(tokens.tokens, 16, max_tokens)
    clusters, sizes = ClusterMap.of(tokens, text), token_bytes_of(sized_corpus)
    counted, text_bytes, _ = scored_text(sized_corpus, "code", "test", text, clusters, sizes)
    expected_tokens, expected_bytes = np.zeros(clusters.count), np.zeros(clusters.count)
    for position in np.concatenate([positions for positions, _ in text.scored_blocks()]):
        cluster = clusters.at(np.array([position]))[0]
        expected_tokens[cluster] += 1
        expected_bytes[cluster] += 2 * sizes[tokens.tokens[position]]
    assert counted.tolist() == expected_tokens.tolist()
    assert text_bytes is not None
    assert np.abs(text_bytes - expected_bytes).max() <= 1
    assert text_bytes.sum() == round(expected_bytes.sum())


@pytest.mark.parametrize("cause", ["no tokenizer", "no bytes"])
def test_unknown_bytes_are_none(sized_corpus, cause):
    tokens = open_tokens(sized_corpus, "news", "test")
    text = choose_windows(tokens.tokens, 16)
    sizes = None if cause == "no tokenizer" else token_bytes_of(sized_corpus)
    if cause == "no bytes":
        domain = sized_corpus.domains["news"]
        unknown = dataclasses.replace(domain.test, text_bytes=0)
        domains = {**sized_corpus.domains, "news": dataclasses.replace(domain, test=unknown)}
        sized_corpus = dataclasses.replace(sized_corpus, domains=domains)
    clusters = ClusterMap.of(tokens, text)
    assert scored_text(sized_corpus, "news", "test", text, clusters, sizes)[1] is None
