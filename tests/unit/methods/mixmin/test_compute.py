"""MixMin with n-gram models, from text to mixture."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import Mixture, MixtureWarning
from megatron_chameleon.corpus.indexed import in_memory
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.sample import sample_documents
from megatron_chameleon.corpus.target import average_target, count_leaked, parse_target
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.gold_answers import GoldAnswer, gold_answers
from megatron_chameleon.methods.mixmin import (
    EstimateOptions,
    ExpertOptions,
    ExpertTokenizer,
    HeadroomOptions,
    MixminOptions,
    TargetTaskOptions,
    compute_headroom,
)
from megatron_chameleon.methods.mixmin.compute import compute_mixture as compute
from megatron_chameleon.methods.mixmin.headroom import parse_noise, seeds_needed
from megatron_chameleon.methods.mixmin.text import ByteCoder, answer_blocks, choose_blocks
from tests.fixtures.task_data import write_task_data

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
QUICK = EstimateOptions(bootstrap_resamples=10)
WORDS = {
    "sea": ["wave", "tide", "reef", "sail", "gull", "salt", "deck", "rope", "fish", "port"],
    "law": ["court", "judge", "brief", "plea", "jury", "bench", "oath", "writ", "clerk", "suit"],
    "farm": ["barn", "field", "wheat", "plough", "goats", "hedge", "seed", "soil", "fence"],
}


def sentence(rng, words, length=40):
    return " ".join(rng.choice(words, length))


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def texts(tmp_path):
    """Three domains, and a target of three parts of the first and one of the second."""
    rng = np.random.default_rng(0)
    paths = {}
    for name, words in WORDS.items():
        documents = [sentence(rng, words) for _ in range(60)]
        paths[name] = write_lines(tmp_path / f"{name}.jsonl", documents)
    mixed = [sentence(rng, WORDS["law" if i % 4 == 3 else "sea"]) for i in range(40)]
    paths["target"] = write_lines(tmp_path / "target.jsonl", mixed)
    return paths


@pytest.fixture
def options(texts, tmp_path):
    def make(**changes):
        domains = tuple((f"{name}={texts[name]}",) for name in WORDS)
        settings = {
            "source": SourceOptions(domains),
            "output": tmp_path / "out" / "mixture.json",
            "target": f"mine={texts['target']}",
            "estimate": QUICK,
        }
        return MixminOptions(**(settings | changes))

    return make


def test_weights_are_the_shares_of_the_target(options, capsys):
    compute(options())
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "domain explains" in each)
    assert "sea 7" in line
    mixture = Mixture.load(options().output)
    assert mixture.parameters["written"] == "estimate"
    assert mixture.weights["sea"] == pytest.approx(0.75, abs=0.05)
    assert mixture.weights["law"] == pytest.approx(0.25, abs=0.05)
    assert mixture.intervals is not None
    low, high = mixture.intervals["sea"]
    assert low <= mixture.weights["sea"] <= high
    gain = mixture.parameters["predicted_gain"]["uniform"]
    assert gain["low"] > 0.05


def test_limits_hold(options):
    estimate = EstimateOptions(bootstrap_resamples=10, max_weight="sea=0.5", min_weight="farm=0.1")
    compute(options(estimate=estimate))
    weights = Mixture.load(options().output).weights
    assert weights["sea"] == pytest.approx(0.5)
    assert weights["farm"] == pytest.approx(0.1)


def test_a_target_that_resembles_no_domain_gets_the_prior(options, tmp_path):
    rng = np.random.default_rng(1)
    digits = [" ".join(map(str, rng.integers(0, 10**9, 40))) for _ in range(30)]
    path = write_lines(tmp_path / "digits.jsonl", digits)
    compute(options(target=f"digits={path}"))
    mixture = Mixture.load(options().output)
    assert list(mixture.weights.values()) == pytest.approx([1 / 3] * 3)
    assert mixture.parameters["resembles"] is False
    assert mixture.parameters["unexplained"] > 0.9
    accepting = EstimateOptions(bootstrap_resamples=10, accept_uncertain=True)
    compute(options(target=f"digits={path}", estimate=accepting))
    assert Mixture.load(options().output).parameters["written"] == "estimate"


def test_the_average_of_the_domains_has_nothing_to_win(options):
    compute(options(target=None))
    mixture = Mixture.load(options().output)
    assert mixture.parameters["written"] == "prior"
    assert list(mixture.weights.values()) == pytest.approx([1 / 3] * 3)
    assert max(mixture.parameters["estimate"].values()) < 0.45


def test_target_documents_in_the_training_text_are_counted(options, texts, tmp_path):
    lines = texts["sea"].read_text().splitlines()[:12] + texts["target"].read_text().splitlines()
    leaked = tmp_path / "leaked.jsonl"
    leaked.write_text("\n".join(lines) + "\n")
    with pytest.warns(MixtureWarning, match="12 of 52 documents"):
        compute(options(target=f"mine={leaked}"))
    # The same as a domain without a weight.
    source = SourceOptions((*options().source.input, (f"mine={leaked}",)))
    with pytest.warns(MixtureWarning, match="12 of 52 documents"):
        compute(options(source=source, domains="sea,law,farm", target="mine"))
    # Of a source that is larger than its sample, not all documents are looked up.
    small = ExpertOptions(sample_tokens=2000)
    link = tmp_path / "link.jsonl"
    link.symlink_to(texts["sea"])
    with pytest.warns(MixtureWarning, match="1 of 1 files of 'mine' are also files of 'sea'"):
        compute(options(models=small, target=f"mine={link}"))


def test_documents_of_a_held_out_target_in_the_training_text_are_counted(options, leaked_corpus):
    with pytest.warns(MixtureWarning, match="20 of 20 documents of 'poems' .* of 'news'"):
        compute(
            MixminOptions(
                corpus=leaked_corpus.root,
                output=options().output,
                target="poems",
                estimate=QUICK,
            )
        )


def test_natural_shares_are_those_of_the_text(options, texts, tmp_path, monkeypatch, capsys):
    natural = EstimateOptions(bootstrap_resamples=2, prior="natural")
    compute(options(estimate=natural))
    expected = Mixture.load(options().output).parameters["prior"]
    compressed = tmp_path / "sea.jsonl.gz"
    compressed.write_bytes(gzip.compress(texts["sea"].read_bytes()))
    inputs = dict(item[0].split("=") for item in options().source.input)
    inputs["sea"] = str(compressed)
    source = SourceOptions(tuple((f"{name}={path}",) for name, path in inputs.items()))
    compute(options(source=source, estimate=natural))
    assert Mixture.load(options().output).parameters["prior"] == expected
    # The files of some data sets have no known size.
    lines = [json.loads(line)["text"] for line in texts["sea"].open()]
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.csv").write_text("\n".join(["text", *lines]) + "\n")
    monkeypatch.setattr("megatron_chameleon.corpus.sample._COARSE", (2, 1 << 10))
    inputs["sea"] = f"hf:{tmp_path / 'set'}"
    source = SourceOptions(tuple((f"{name}={path}",) for name, path in inputs.items()))
    small = ExpertOptions(sample_tokens=300)
    with pytest.raises(UserError, match="text in 'sea' is unknown"):
        compute(options(source=source, estimate=natural, models=small))
    capsys.readouterr()
    compute(options(source=source, models=small))
    assert "over the natural mixture: unknown" in capsys.readouterr().out
    assert "natural" not in Mixture.load(options().output).parameters["predicted_gain"]


def test_an_added_domain_reads_only_its_own_text(options, texts, tmp_path, monkeypatch):
    compute(options(source=SourceOptions(tuple((f"{n}={texts[n]}",) for n in ("sea", "law")))))
    read = []

    def recording(source, sources, name, *rest):
        read.append(name)
        return sample_documents(source, sources, name, *rest)

    module = "megatron_chameleon.methods.mixmin.text"
    monkeypatch.setattr(f"{module}.sample_documents", recording)
    compute(options())
    assert read == ["farm"]
    first = Mixture.load(options().output)
    # A damaged sample, and a sample of changed text, are read again.
    (options().output.parent / "samples" / "law.npz").write_bytes(b"damaged")
    write_lines(texts["sea"], [json.loads(line)["text"] for line in texts["sea"].open()][:50])
    read.clear()
    compute(options())
    assert sorted(read) == ["law", "sea"]
    assert Mixture.load(options().output).weights != first.weights


def test_a_domain_without_a_weight_is_a_target(options, texts, corpus):
    inputs = tuple((f"{name}={path}",) for name, path in texts.items())
    chosen = options(source=SourceOptions(inputs), domains="sea,farm,law", target="target")
    compute(chosen)
    mixture = Mixture.load(chosen.output)
    assert mixture.parameters["target_documents"] == 40
    assert mixture.parameters["target"]["shares"] == {"target": 1.0}
    expected = {"sea": 0.75, "law": 0.25, "farm": 0.0}
    assert mixture.weights == pytest.approx(expected, abs=0.05)
    write_lines(texts["target"], [json.loads(line)["text"] for line in texts["target"].open()][:20])
    compute(chosen)
    assert Mixture.load(chosen.output).parameters["target_documents"] == 20
    # The same with a corpus.
    first, *others = corpus.names
    compute(
        MixminOptions(
            corpus=corpus.root,
            output=chosen.output,
            domains=",".join(others),
            target=first,
            estimate=QUICK,
        )
    )
    mixture = Mixture.load(chosen.output)
    assert mixture.parameters["target"]["shares"] == {first: 1.0}
    assert set(mixture.weights) == set(others)
    # The name of a text must not be that of a domain.
    with pytest.raises(UserError, match="'target' is a domain"):
        compute(dataclasses.replace(chosen, target=f"target={texts['sea']}"))


@pytest.mark.parametrize(
    "changes",
    [
        {"source": SourceOptions(())},
        {"token_budget": 1000},
        {"tokenizer": ExpertTokenizer(eod_token="<end>")},
        {"target": "unknown"},
        {"estimate": EstimateOptions(prior="missing.json")},
        {"estimate": EstimateOptions(min_weight="0.5")},
    ],
)
def test_invalid_options_are_errors(options, changes):
    with pytest.raises(UserError):
        compute(options(**changes))
    assert not options().output.exists()


@pytest.mark.parametrize("content", [b"", b'{"text": "a few words"}\n', b"\x00\x01\xff\xfe" * 100])
def test_a_target_without_enough_text_is_an_error(options, tmp_path, content):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match="--target"):
        compute(options(target=f"bad={path}"))


def test_blocks_cover_documents_up_to_the_maximum():
    lengths = np.array([5000, 0, 300, 2048, *[100] * 30], np.int32)
    file = in_memory("memory", np.arange(lengths.sum()).astype(np.int32), lengths)
    everything = choose_blocks(file, 10**6, 0, "all")
    np.testing.assert_array_equal(everything.tokens, np.arange(lengths.sum()))
    assert len(everything.starts) == 33
    some = choose_blocks(file, 4000, 0, "some")
    assert 3000 < len(some.tokens) <= 4000
    assert np.isin(some.tokens, everything.tokens).all()


def test_leaked_documents_are_found_once():
    training = in_memory("t", np.arange(100, dtype=np.int32), np.array([20, 30, 50], np.int32))
    held_out = np.concatenate([np.arange(20, 50), np.arange(1, 21), np.arange(20, 50)])
    target = in_memory("x", held_out.astype(np.int32), np.array([30, 20, 30], np.int32))
    assert count_leaked(target, training, 100) == (2, 3)


@pytest.mark.parametrize("with_eod", [(0,), (1,), (0, 1), ()])
def test_leaked_documents_are_found_with_and_without_the_end_of_document_token(with_eod):
    documents, eod = [np.arange(30), np.arange(40, 80)], [99]

    def file(has_eod):
        found = [np.append(each, eod) if has_eod else each for each in documents]
        lengths = np.array([len(each) for each in found], np.int32)
        return in_memory("memory", np.concatenate(found).astype(np.int32), lengths)

    assert count_leaked(file(0 in with_eod), file(1 in with_eod), 99) == (2, 2)


@pytest.fixture
def headroom(options, tmp_path, capsys):
    """``headroom(**changes)``: the printed lines."""

    def run(**changes):
        given = options()
        settings = {"source": given.source, "target": given.target}
        settings |= {} if "corpus" in changes else {"store": tmp_path / "samples"}
        compute_headroom(HeadroomOptions(**(settings | changes)))
        return capsys.readouterr().out.splitlines()

    return run


def test_headroom_reports_whether_a_mixture_is_worth_computing(headroom, options):
    lines = headroom()
    assert any("0.0125 nats per byte (assumed, for the loss of a target)" in line for line in lines)
    assert lines[-1].startswith("a mixture for this target is worth computing")
    assert not options().output.exists()
    assert headroom(target=None)[-1].startswith("train with 'uniform'")


@pytest.mark.parametrize(
    ("gain", "noise", "seeds"), [(0.03, 0.03, 10), (0.06, 0.03, 5), (0.09, 0.03, 4)]
)
def test_seeds_needed_are_those_of_a_t_test(gain, noise, seeds):
    """Tabulated sample sizes of a two-sided t-test at 5% with a power of 80%."""
    assert seeds_needed(gain, noise) == f"{seeds}"


def test_seed_noise_is_that_of_the_target_in_a_comparison(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.normal(3, 0.5, size=(4, 3))  # domains a and b, and the held-out domain mine
    losses = {"uniform": base, "other": base + rng.normal(0, 0.1, size=(4, 3))}
    record = {
        "baseline": "uniform",
        "domains": ["a", "b"],
        "mixtures": {
            name: {
                key: {
                    f"seed {seed}": {domain: math.exp(row["abm".index(domain[0])]) for domain in of}
                    for seed, row in enumerate(values)
                }
                for key, of in (("perplexity", ["a", "b"]), ("held_out_perplexity", ["mine"]))
            }
            for name, values in losses.items()
        },
    }
    path = tmp_path / "compare_methods.json"
    path.write_text(json.dumps(record))
    differences = losses["other"] - base
    assert parse_noise(str(path), None) == parse_noise(str(path), average_target(["a", "mine"]))
    expected: dict[str, list[float]] = {
        "mine": [0, 0, 1],
        "mine=3,a": [0.25, 0, 0.75],
        "mine,unknown": [0.5, 0.5, 0],
    }
    for target, shares in expected.items():
        parsed = parse_target(target, ["a", "mine", "unknown"], SourceOptions(()))
        noise, source = parse_noise(str(path), parsed)
        assert noise == pytest.approx((differences @ shares).std(ddof=1))
        assert ("training domains" in source) == (shares[2] == 0)
    path.write_text("{}")
    for value in ("-1", str(path)):
        with pytest.raises(UserError):
            parse_noise(value, None)


def test_seed_noise_is_that_of_all_targets_in_a_comparison_of_targets():
    """The records hold the gain of each seed, whose standard deviation is computed directly."""
    path = RESULTS / "compare-targets-registers-methods.json"
    found = [
        np.var(gains, ddof=1)
        for target in json.loads(path.read_text())["targets"].values()
        for name, gains in target["gain"].items()
        if not target["equals_baseline"][name]
    ]
    noise, source = parse_noise(str(path), None)
    assert noise == pytest.approx(np.mean(found) ** 0.5)
    assert "8 targets" in source


@pytest.mark.parametrize(
    "changes",
    [
        {"source": SourceOptions((), text_key="words")},
        {"source": SourceOptions((), max_document_bytes=9), "target": "news=2,code=1"},
        {"estimate": EstimateOptions(accept_uncertain=True)},
    ],
)
def test_options_without_effect_are_errors(headroom, corpus, changes):
    with pytest.raises(UserError, match="leave it out"):
        headroom(**{"corpus": corpus.root, "source": SourceOptions(()), "target": "news"} | changes)


def test_a_short_domain_of_the_default_target_is_named_with_the_fix(options, texts):
    write_lines(texts["law"], ["a few words"] * 60)
    with pytest.raises(UserError, match=r"'law' has \d+ bytes.* leave 'law' out of --domains"):
        compute(options(target=None))
    compute(options(target=None, domains="sea,farm"))


def test_tasks_are_a_target(options, tmp_path):
    data = write_task_data(tmp_path / "data", 24)
    tasks = TargetTaskOptions(tasks=("sciq",), data_dir=data)
    answers = gold_answers(tasks)["sciq"]
    assert len(answers) == 24
    rng = np.random.default_rng(0)
    words = " ".join(answer.continuation for answer in answers).split()
    like = write_lines(tmp_path / "like.jsonl", [sentence(rng, words) for _ in range(60)])
    domains = SourceOptions(((f"like={like}",), (f"sea={options().source.input[0][0][4:]}",)))
    compute(options(source=domains, target=None, downstream=tasks))
    mixture = Mixture.load(options().output)
    assert mixture.parameters["target"]["shares"] == {"sciq": 1.0}
    assert mixture.parameters["target_documents"] == 24
    assert mixture.weights["like"] > 0.9
    # The likelihood is that of the answers' bytes, and of nothing before them.
    blocks = answer_blocks(answers, ByteCoder(), 1 << 20, 1 << 20, 0, "sciq")
    assert blocks.is_scored.sum() == sum(len(each.continuation.encode()) for each in answers)
    sums = np.bincount(blocks.documents, blocks.weights)
    np.testing.assert_allclose(sums, 1.0)
    for number, start in enumerate(blocks.starts):
        stop = [*blocks.starts, len(blocks.tokens)][number + 1]
        whole = ByteCoder().decode(blocks.tokens[start:stop].tolist())
        assert whole in {each.context + each.continuation for each in answers}
    with pytest.raises(UserError, match="does not name it"):
        compute(options(source=domains, target="sea", downstream=tasks))


def test_answers_are_kept_whole_and_do_not_have_to_resemble_a_domain(options, tmp_path):
    answers = [GoldAnswer(f"{n} " + "x" * 90, " yes" if n % 2 else " no" * 60, 4) for n in range(9)]
    blocks = answer_blocks(answers, ByteCoder(), 1 << 20, 64, 0, "closed")
    for number, start in enumerate(blocks.starts):
        stop = [*blocks.starts, len(blocks.tokens)][number + 1]
        text = ByteCoder().decode(blocks.tokens[start:stop].tolist())
        scored = blocks.is_scored[start:stop].sum()
        assert text.endswith((" yes", " no" * 60))
        assert scored == (4 if text.endswith("yes") else 180)
        assert len(text) == max(64, scored)
    data = write_task_data(tmp_path / "data", 12)
    tasks = TargetTaskOptions(tasks=("sciq",), data_dir=data)
    compute(options(target=None, downstream=tasks))
    parameters = Mixture.load(options().output).parameters
    assert parameters["resembles"] is True
    assert parameters["unexplained"] == 0


def test_another_key_of_a_text_is_another_text(texts):
    def hash_of(key):
        source = SourceOptions((), text_key=key)
        return parse_target(f"mine={texts['target']}", [], source).texts_hash

    assert hash_of("text") == hash_of("text") != hash_of("words")


def test_passages_are_adjacent_blocks_of_a_document():
    lengths = np.array([9000, 700] * 8, np.int32)
    tokens = np.concatenate([np.arange(n) + 10_000 * d for d, n in enumerate(lengths)])
    file = in_memory("text", tokens, lengths)
    blocks = choose_blocks(file, 30_000, 0, "long")
    passages = np.split(blocks.tokens, np.cumsum(blocks.passages)[:-1])
    assert all((np.diff(passage) == 1).all() for passage in passages)
    jumps = np.flatnonzero(np.diff(blocks.tokens) != 1)
    assert len(passages) == len(jumps) + 1 > len(blocks.starts)
