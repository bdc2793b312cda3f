"""Chameleon on one rank: from corpus and proxy to mixture.json."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import CheckpointRecord, EmbeddingStore, Mixture, find_checkpoint
from megatron_chameleon.artifacts.corpus import index_file_bytes
from megatron_chameleon.artifacts.mixture import MAX_AFFINITY_DOMAINS
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon.options import ExtractionOptions, RecipeOptions
from megatron_chameleon.methods.output import HEAVIEST, LIGHTEST, MAX_ROWS, mixture_table
from megatron_chameleon.mixture import (
    RECIPES,
    DegenerateScoreWarning,
    bootstrap,
    bootstrap_weights,
    chameleon_weight_fn,
    chameleon_weights,
)
from megatron_chameleon.model.flops import paper_parameters
from megatron_chameleon.parallel.options import ParallelOptions
from tests.distributed.launch import flags
from tests.small_corpus import DOMAINS, write_small_corpus
from tests.unit.methods.chameleon_runs import (
    RESAMPLES,
    SCALED,
    WINDOWS,
    compute,
    means_of,
    options,
    shared_store,
    weigh_synthetic,
)
from tests.unit.poison import poison_checkpoint

__all__ = ["compute", "options", "shared_store", "weigh_synthetic"]  # fixtures


def values(by_domain):
    return np.array(list(by_domain.values()))


@pytest.mark.parametrize("mode", ["pretrain", "finetune"])
def test_mixture_is_computed_from_the_mean_embeddings(
    compute, corpus, finished_run, shared_store, mode
):
    mixture = compute(mode=mode)
    expected = chameleon_weights(means_of(shared_store), mode, "scaled")
    assert list(mixture.weights) == list(DOMAINS)
    np.testing.assert_allclose(values(mixture.weights), expected.weights, rtol=1e-9)
    np.testing.assert_allclose(values(mixture.scores), expected.scores, rtol=1e-9)
    np.testing.assert_allclose(mixture.affinity, expected.affinity, rtol=1e-9, atol=1e-12)
    assert mixture.method == f"chameleon-{mode}"
    record = CheckpointRecord.load(find_checkpoint(finished_run))
    assert mixture.provenance.inputs == {"corpus": corpus.hash, "checkpoint": record.hash}
    trained, embedded = sum(record.domain_tokens.values()), WINDOWS * len(DOMAINS) * 32
    assert mixture.parameters == {
        "mode": mode,
        "recipe": dataclasses.asdict(RECIPES["scaled"]),
        "embedding": {
            "model_hash": record.hash,
            "cross_documents": False,
            "dtype": "float32",
            "final_norm": False,
            "layer": 2,  # the middle of four
            "window_length": 32,  # the proxy's
            "num_windows": WINDOWS,
            "seed": 0,
            "tokenizer_hash": corpus.tokenizer.sha256,
        },
        "effective_ridge": pytest.approx(expected.effective_ridge),
        "effective_temperature": expected.effective_temperature,
        "effective_dimension": pytest.approx(expected.effective_dimension),
        "windows": dict.fromkeys(DOMAINS, WINDOWS),
        "bootstrap_resamples": RESAMPLES,
        "bootstrap_group": 1,
        "paper_flops": paper_parameters("nano") * (6 * trained + 2 * embedded),
    }


def test_intervals_are_those_of_the_bootstrap_over_windows(compute, shared_store):
    mixture = compute(weighting=dataclasses.replace(SCALED, confidence=0.8))
    store = EmbeddingStore.load(shared_store)
    expected = bootstrap_weights(
        [store.vectors(name) for name in DOMAINS],
        chameleon_weight_fn("pretrain", "scaled"),
        num_resamples=RESAMPLES,
        seed=0,
        confidence=0.8,
    )
    low, high = values(mixture.intervals).T
    np.testing.assert_allclose(low, expected.low, rtol=1e-9)
    np.testing.assert_allclose(high, expected.high, rtol=1e-9)
    assert mixture.confidence == 0.8
    ranked = sorted(DOMAINS, key=mixture.weights.get, reverse=True)
    assert [(one, other) for one, other, _ in mixture.outweighs] == list(itertools.pairwise(ranked))
    assert all(0.5 < likely <= 1 for _, _, likely in mixture.outweighs)


def test_a_fresh_process_writes_the_same_bytes(compute, options, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    relative = {"output": Path("mixture.json"), "store": Path("embeddings")}
    tool = Path(__file__).resolve().parents[3] / "tools" / "compute_mixture.py"
    subprocess.run(
        [sys.executable, str(tool), *flags(options(**relative))],
        cwd=there,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
    )
    monkeypatch.chdir(here)
    compute(**relative)
    one, other = (json.loads((f / "mixture.json").read_text()) for f in (here, there))
    for record in (one, other):
        del record["provenance"], record["cost"]
    assert json.dumps(one) == json.dumps(other)
    for name in DOMAINS:
        file = EmbeddingStore.load(here / "embeddings").domains[name].file
        first, second = ((f / "embeddings" / file).read_bytes() for f in (here, there))
        assert first == second


def test_printed_table_and_windows_needed(compute, capsys):
    mixture = compute(weighting=dataclasses.replace(SCALED, precision=1e-3))
    printed = capsys.readouterr().out
    for name, weight in mixture.weights.items():
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{name} ")]
        low, high = mixture.intervals[name]
        assert f"{weight:.4f}" in line
        assert f"{low:.4f} to {high:.4f}" in line
    half = max(high - low for low, high in mixture.intervals.values()) / 2
    (line,) = [line for line in printed.splitlines() if "0.001" in line]
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]+(?![.\d])", line)]
    assert pytest.approx(WINDOWS * (half / 1e-3) ** 2, abs=1) in numbers


def test_uninformative_weights_raise_warnings(compute, tmp_path):
    # Two domains are symmetric about their mean, so centered ones have equal weights.
    with pytest.warns(UserWarning, match="uniform"):
        compute(domains=f"{DOMAINS[0]},{DOMAINS[1]}")
    sharp = RecipeOptions("scaled", temperature=1e-3, bootstrap_resamples=RESAMPLES)
    with pytest.warns(UserWarning, match="one domain"):
        compute(weighting=sharp)
    corpus = write_small_corpus(tmp_path / "corpus", ("a", "b"))
    twin = dataclasses.replace(corpus, domains={"a": corpus.domains["a"], "b": corpus.domains["a"]})
    twin.save()
    every = ExtractionOptions(num_windows=10**6)  # samples depend on the names of domains
    with pytest.warns(DegenerateScoreWarning, match="'a', 'b'"):
        mixture = compute(corpus=twin.root, extraction=every, store=tmp_path / "twin")
    assert mixture.weights == pytest.approx({"a": 0.5, "b": 0.5}, abs=1e-6)
    tokens = twin.domains["a"].train.tokens
    assert all(WINDOWS < count < tokens for count in mixture.parameters["windows"].values())


def test_token_budget_and_max_epochs(compute, corpus, capsys):
    tokens = {name: corpus.domains[name].train.tokens for name in DOMAINS}
    free = compute(token_budget=100_000)
    assert free.token_budget == 100_000
    assert free.epochs == pytest.approx(
        {name: weight * 100_000 / tokens[name] for name, weight in free.weights.items()}
    )
    assert free.max_epochs is free.unconstrained is free.capped is None
    most = 0.97 * max(free.epochs.values())
    capsys.readouterr()
    limited = compute(token_budget=100_000, max_epochs=most)
    assert ", ".join(limited.capped) in capsys.readouterr().out
    assert limited.unconstrained == free.weights
    assert sum(limited.weights.values()) == pytest.approx(1, abs=1e-12)
    assert set(limited.capped) < set(DOMAINS)
    for name in DOMAINS:
        if name in limited.capped:
            assert limited.epochs[name] == pytest.approx(most)
            assert limited.intervals[name][1] <= most * tokens[name] / 100_000 * (1 + 1e-12)
        else:
            assert limited.epochs[name] < most


def test_kept_domains_retain_their_ratios(compute, tmp_path):
    everything = compute()
    old = Mixture({DOMAINS[0]: 0.9, DOMAINS[1]: 0.1})
    old.save(tmp_path / "old.json")
    mixture = compute(keep=tmp_path / "old.json")
    new = DOMAINS[2]
    assert mixture.weights[new] == pytest.approx(everything.weights[new])
    assert mixture.intervals[new] == pytest.approx(everything.intervals[new])
    assert mixture.weights[DOMAINS[0]] / mixture.weights[DOMAINS[1]] == pytest.approx(9)
    assert sum(mixture.weights.values()) == pytest.approx(1, abs=1e-12)
    assert mixture.provenance.inputs["kept mixture"] == old.hash
    limited = compute(keep=tmp_path / "old.json", token_budget=10_000, max_epochs=0.9)
    assert limited.unconstrained == mixture.weights
    assert limited.capped == [new]
    assert limited.weights[DOMAINS[0]] / limited.weights[DOMAINS[1]] == pytest.approx(9)


@pytest.mark.parametrize(
    ("weighting", "overrides"),
    [
        (RecipeOptions("paper"), {}),
        (RecipeOptions("reference"), {}),
        (RecipeOptions("scaled", ridge=0.5), {"ridge": 0.5, "ridge_relative": False}),
        (
            RecipeOptions("scaled", temperature=3.0),
            {
                "temperature_pretrain": 3.0,
                "temperature_finetune": 3.0,
                "temperature_relative": False,
            },
        ),
        (RecipeOptions("scaled", center=False), {"center": False}),
        (
            RecipeOptions("reference", normalize=False, ridge=1e-3),
            {"normalize": False, "ridge": 1e-3},
        ),
    ],
)
def test_recipe_and_hyperparameters(compute, options, shared_store, weighting, overrides):
    compute(weighting=dataclasses.replace(weighting, bootstrap_resamples=2))
    # Infinite limits of the scores are stored as null.
    text = options().output.read_text()
    body = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    expected = chameleon_weights(means_of(shared_store), "pretrain", weighting.recipe, **overrides)
    np.testing.assert_allclose(values(body["weights"]), expected.weights, rtol=1e-9)
    recipe = weighting.resolve()
    for field, value in overrides.items():
        assert getattr(recipe, field) == value == body["parameters"]["recipe"][field]


def test_store_is_reused_and_extended(compute, tmp_path, capsys):
    """Only new domains are embedded; selections and numbers of domains share a store."""
    two = write_small_corpus(tmp_path / "two", ("a", "b"))
    three = write_small_corpus(tmp_path / "three", ("a", "b", "c"))
    folder = tmp_path / "out" / "embeddings"  # the default
    compute(corpus=two.root, store=None)
    assert ", 0 domains reused from " in capsys.readouterr().out
    before = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert len(before) == 2
    first = compute(corpus=three.root, store=None)
    assert ", 2 domains reused from " in capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = compute(corpus=three.root, store=None)
    assert ", 3 domains reused from " in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == files
    assert (again.weights, again.intervals) == (first.weights, first.intervals)
    assert {path: path.read_bytes() for path in before} == before
    some = compute(corpus=three.root, store=None, domains="c, a")
    expected = chameleon_weights(means_of(folder, ["a", "c"]), "pretrain", "scaled")
    assert list(some.weights) == ["a", "c"]
    np.testing.assert_allclose(values(some.weights), expected.weights, rtol=1e-9)


def test_extraction_options(compute, shared_store, tmp_path):
    """Each changes the embeddings, except for the batch size; bfloat16 rounds them."""
    compute()
    exact, weights = means_of(shared_store), set()
    for change in (
        {"layer": 3},
        {"window_length": 16},
        {"extraction_seed": 1},
        {"num_windows": 30},
        {"embedding_dtype": "bfloat16"},
        {"embedding_batch_size": 7},
    ):
        store = tmp_path / next(iter(change))
        extraction = ExtractionOptions(**{"num_windows": WINDOWS, **change})  # type: ignore[arg-type]
        weights.add(tuple(compute(extraction=extraction, store=store).weights.values()))
        means = means_of(store)
        if "layer" not in change:
            error = np.linalg.norm(means - exact, axis=1) / np.linalg.norm(exact, axis=1)
            limits = {"embedding_dtype": (1e-5, 2e-2), "embedding_batch_size": (0, 1e-5)}
            low, high = limits.get(store.name, (1e-3, 1))
            assert low <= error.max() < high
    assert len(weights) >= 5


MISTAKES = [
    ({"weighting": RecipeOptions("scaled", normalize=False)}, "--recipe"),
    ({"extraction": ExtractionOptions(layer=99)}, "--layer 99"),
    ({"extraction": ExtractionOptions(layer=0)}, "--layer 0"),
    ({"extraction": ExtractionOptions(window_length=33)}, "--window-length 33"),
    ({"max_epochs": 4.0}, "--max-epochs"),
    ({"max_epochs": 2.0, "token_budget": 10**9}, "--max-epochs"),
    ({"target_strength": 0.5}, "--target-strength"),
    ({"domains": "news,prose"}, "'prose'"),
    ({"domains": " , "}, "--domains"),
    ({"keep": Path("nowhere.json")}, "nowhere.json"),
    ({"checkpoint": Path("nowhere")}, "--checkpoint nowhere"),
    ({"corpus": Path("nowhere")}, "nowhere/corpus.json"),
    ({"parallel": ParallelOptions(2)}, "tensor 2"),
]


@pytest.mark.parametrize(("changes", "named"), MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(compute, tmp_path, changes, named):
    with pytest.raises(UserError, match=re.escape(named)) as error:
        compute(**changes)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_unusable_corpora_and_mixtures(compute, tmp_path):
    """Another tokenizer, a domain without training text, and a kept mixture of other domains."""
    other = write_small_corpus(tmp_path / "other", tokenizer_hash="9" * 64)
    with pytest.raises(UserError, match="tokenizer"):
        compute(corpus=other.root)
    empty = write_small_corpus(tmp_path / "empty")
    prefix = empty.prefix("code", "train")
    Path(f"{prefix}.bin").write_bytes(b"")
    Path(f"{prefix}.idx").write_bytes(bytes(index_file_bytes(0)))
    domain = empty.domains["code"]
    train = dataclasses.replace(domain.train, documents=0, tokens=0, block_checksums=None)
    domains = {**empty.domains, "code": dataclasses.replace(domain, train=train)}
    dataclasses.replace(empty, domains=domains).save()
    with pytest.raises(UserError, match="domain 'code'"):
        compute(corpus=empty.root)
    Mixture({"other": 1.0}).save(tmp_path / "other.json")
    with pytest.raises(UserError, match="--keep"):
        compute(keep=tmp_path / "other.json")


def test_a_diverged_proxy_writes_no_mixture(compute, trained_run, tmp_path):
    poison_checkpoint(find_checkpoint(trained_run), "decoder.layers.1.mlp.linear_fc2.bias")
    with pytest.raises(UserError, match=r"layer 2 .* not finite in 60 of 60"):
        compute(checkpoint=trained_run, store=tmp_path / "store")
    assert not (tmp_path / "out").exists()
    before = ExtractionOptions(layer=1)  # of the damaged layer
    weights = compute(checkpoint=trained_run, extraction=before, store=None).weights
    assert all(weight > 0 for weight in weights.values())


def test_a_damaged_store_is_repaired_by_deleting_the_named_file(compute, tmp_path):
    compute(store=tmp_path / "store")
    store = EmbeddingStore.load(tmp_path / "store")
    damaged = store.root / store.domains["code"].file
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1])
    with pytest.raises(UserError, match=re.escape(str(damaged))):
        compute(store=tmp_path / "store")
    damaged.unlink()
    compute(store=tmp_path / "store")
    assert damaged.read_bytes() == content


def test_many_domains_have_no_affinity_and_a_shortened_table(weigh_synthetic, tmp_path):
    few = weigh_synthetic(MAX_ROWS).mixture
    assert len(mixture_table(few).splitlines()) == 1 + MAX_ROWS
    assert np.shape(few.affinity) == (MAX_ROWS, MAX_ROWS)
    made = weigh_synthetic(MAX_AFFINITY_DOMAINS + 1)
    many = made.mixture
    assert many.affinity is None
    many.save(tmp_path / "many.json")
    assert (tmp_path / "many.json").stat().st_size < 500 * len(many.weights)
    expected = chameleon_weights(made.windows.means, "pretrain", "scaled").weights
    np.testing.assert_allclose(values(many.weights), expected)
    ranked = sorted(many.weights, key=lambda name: -many.weights[name])
    shown = [line.split()[0] for line in mixture_table(many).splitlines()[1:]]
    assert shown == [*ranked[:HEAVIEST], "...", *ranked[-LIGHTEST:]]


def test_windows_are_grouped_for_the_bootstrap_of_many_domains(weigh_synthetic, monkeypatch):
    whole = weigh_synthetic(20)
    assert whole.mixture.parameters["bootstrap_group"] == whole.windows.group == 1
    monkeypatch.setattr(bootstrap, "MAX_VALUES", 20 * 32 * whole.windows.means.shape[1])
    grouped = weigh_synthetic(20)
    assert grouped.mixture.parameters["bootstrap_group"] == 2
    assert [len(rows) for rows in grouped.windows.resampled] == [32] * 20
    assert grouped.mixture.weights == whole.mixture.weights
    assert set(grouped.mixture.parameters["windows"].values()) == {64}  # windows, not groups
    widths = [np.diff(values(each.mixture.intervals)) for each in (whole, grouped)]
    assert np.median(widths[1] / widths[0]) == pytest.approx(1, abs=0.25)
