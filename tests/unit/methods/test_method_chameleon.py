"""tools/compute_mixture.py on one rank: from corpus and proxy to mixture.json."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Corpus,
    EmbeddingStore,
    Mixture,
    find_checkpoint,
)
from megatron_chameleon.artifacts.corpus import index_file_bytes
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.leverage.compute import compute_mixture
from megatron_chameleon.methods.leverage.plan import plan_mixture, resolve_options
from megatron_chameleon.mixture import (
    RECIPES,
    DegenerateScoreWarning,
    bootstrap_weights,
    chameleon_weight_fn,
    chameleon_weights,
)
from megatron_chameleon.model.paper_flops import paper_parameters
from megatron_chameleon.options.mixture import ExtractionOptions, RecipeOptions
from megatron_chameleon.options.parallel import ParallelOptions
from tests.small_corpus import DOMAINS, write_small_corpus
from tests.unit.poison import poison_checkpoint

WINDOWS, RESAMPLES = 60, 200
# Scores of a barely trained proxy are near zero at the reference's ridge, so most tests use this.
SCALED = RecipeOptions(recipe="scaled", bootstrap_resamples=RESAMPLES)


@pytest.fixture
def options(corpus, finished_run, tmp_path):
    """``options(**changes)``: those of the tool, for the finished run as proxy."""

    def make(**changes):
        extraction = ExtractionOptions(num_windows=WINDOWS)
        made = ChameleonOptions(
            corpus=corpus.root,
            checkpoint=finished_run,
            output=tmp_path / "out" / "mixture.json",
            extraction=extraction,
            weighting=SCALED,
        )
        return dataclasses.replace(made, **changes)

    return make


@pytest.fixture
def compute(options):
    """``compute(**changes)``: run the tool and read what it wrote."""

    def run(**changes):
        given = options(**changes)
        compute_mixture(given)
        return Mixture.load(given.output)

    return run


def store_beside(options):
    return EmbeddingStore.load(options().output.parent / "embeddings")


def means_of(store, names=DOMAINS):
    return np.stack([store.vectors(name).astype(np.float64).mean(axis=0) for name in names])


@pytest.mark.parametrize("mode", ["pretrain", "finetune"])
def test_weights_are_those_of_the_mean_embeddings(compute, options, mode):
    mixture = compute(mode=mode)
    expected = chameleon_weights(means_of(store_beside(options)), mode, "scaled")
    assert list(mixture.weights) == list(DOMAINS)
    assert list(mixture.weights.values()) == pytest.approx(expected.weights, rel=1e-9)
    assert sum(mixture.weights.values()) == pytest.approx(1.0, abs=1e-12)
    assert mixture.method == f"chameleon-{mode}"
    assert mixture.scores == pytest.approx(dict(zip(DOMAINS, expected.scores, strict=True)))
    np.testing.assert_allclose(mixture.affinity, expected.affinity, rtol=1e-9, atol=1e-12)


def test_embeddings_in_bfloat16_are_those_in_float32_rounded(compute, options, tmp_path):
    exact = compute()
    exact_means = means_of(store_beside(options))
    in_bf16 = ExtractionOptions(num_windows=WINDOWS, embedding_dtype="bfloat16")
    other = {"output": tmp_path / "rounded.json", "store": tmp_path / "rounded"}
    rounded = compute(extraction=in_bf16, **other)
    means = means_of(EmbeddingStore.load(other["store"]))
    distances = np.linalg.norm(means - exact_means, axis=1) / np.linalg.norm(exact_means, axis=1)
    assert 1e-5 < distances.max() < 2e-2
    assert rounded.weights == pytest.approx(exact.weights, abs=0.02)
    assert rounded.parameters["embedding"]["dtype"] == "bfloat16"


def test_the_two_modes_order_the_domains_the_other_way_round(compute):
    pretrain, finetune = compute().weights, compute(mode="finetune").weights
    assert sorted(DOMAINS, key=pretrain.get) == sorted(DOMAINS, key=finetune.get, reverse=True)
    assert len(set(pretrain.values())) == 3


def test_intervals_are_those_of_the_bootstrap_over_windows(compute, options):
    mixture = compute()
    store = store_beside(options)
    expected = bootstrap_weights(
        [store.vectors(name) for name in DOMAINS],
        chameleon_weight_fn("pretrain", "scaled"),
        num_resamples=RESAMPLES,
        seed=0,
        confidence=0.95,
    )
    low, high = np.array([mixture.intervals[name] for name in DOMAINS]).T
    np.testing.assert_allclose(low, expected.low, rtol=1e-9)
    np.testing.assert_allclose(high, expected.high, rtol=1e-9)
    assert mixture.confidence == 0.95
    weights = np.array(list(mixture.weights.values()))
    assert (low < weights).all()
    assert (weights < high).all()
    assert (high - low > 1e-4).all()


def test_it_is_told_how_sure_the_order_is_and_what_more_windows_would_do(compute, capsys):
    weighting = dataclasses.replace(SCALED, precision=1e-3)
    mixture = compute(weighting=weighting)
    ranked = sorted(DOMAINS, key=mixture.weights.get, reverse=True)
    assert [(one, other) for one, other, _ in mixture.outweighs] == list(itertools.pairwise(ranked))
    assert all(0.5 < likely <= 1 for _, _, likely in mixture.outweighs)
    said = capsys.readouterr().out
    least = min(mixture.outweighs, key=lambda pair: pair[2])
    assert f"{least[0]} outweighs {least[1]} in {least[2]:.0%} of the resamples" in said
    half = max(high - low for low, high in mixture.intervals.values()) / 2
    found = re.search(r"are few, about ([\d,]+) would do", said)
    assert found
    needed = int(found[1].replace(",", ""))
    assert needed == pytest.approx(WINDOWS * (half / 1e-3) ** 2, abs=1)
    compute(weighting=dataclasses.replace(SCALED, precision=0.5))
    assert f"for +-0.5, {WINDOWS} windows of a domain are enough" in capsys.readouterr().out


def test_weights_that_say_little_are_called_out(compute):
    """Two domains lie on either side of their mean, so centred ones always weigh the same."""
    with pytest.warns(UserWarning, match="within noise of uniform"):
        compute(domains=f"{DOMAINS[0]},{DOMAINS[1]}")
    sharp = RecipeOptions("scaled", temperature=1e-3, bootstrap_resamples=RESAMPLES)
    with pytest.warns(UserWarning, match="one domain takes nearly all"):
        compute(weighting=sharp)


def test_a_wider_confidence_gives_wider_intervals(compute):
    def widths(confidence):
        weighting = dataclasses.replace(SCALED, confidence=confidence)
        mixture = compute(weighting=weighting)
        return np.array([high - low for low, high in mixture.intervals.values()])

    assert (widths(0.5) < widths(0.99)).all()


def test_the_file_says_how_it_was_found(compute, options, corpus, finished_run):
    mixture = compute()
    record = CheckpointRecord.load(find_checkpoint(finished_run))
    assert mixture.provenance.inputs == {"corpus": corpus.hash, "checkpoint": record.hash}
    embedding = mixture.parameters["embedding"]
    assert embedding == {
        "model_hash": record.hash,
        "cross_documents": False,
        "dtype": "float32",
        "final_norm": False,
        "layer": 2,  # the middle of four
        "window_length": 32,  # the proxy's
        "num_windows": WINDOWS,
        "seed": 0,
        "tokenizer_hash": corpus.tokenizer.sha256,
    }
    assert mixture.parameters["mode"] == "pretrain"
    assert mixture.parameters["windows"] == dict.fromkeys(DOMAINS, WINDOWS)
    assert mixture.parameters["recipe"] == dataclasses.asdict(RECIPES["scaled"])
    expected = chameleon_weights(means_of(store_beside(options)), "pretrain", "scaled")
    assert mixture.parameters["effective_ridge"] == pytest.approx(expected.effective_ridge)
    assert mixture.parameters["effective_temperature"] == expected.effective_temperature
    assert mixture.parameters["effective_dimension"] == pytest.approx(expected.effective_dimension)
    trained, embedded = sum(record.domain_tokens.values()), WINDOWS * len(DOMAINS) * 32
    per_parameter = 6 * trained + 2 * embedded
    assert mixture.parameters["paper_flops"] == paper_parameters("nano") * per_parameter


def test_a_budget_gives_the_implied_epochs(compute, corpus, capsys):
    assert compute().epochs is None
    capsys.readouterr()
    mixture = compute(token_budget=100_000)
    assert mixture.token_budget == 100_000
    assert mixture.epochs is not None
    table = capsys.readouterr().out
    for name, weight in mixture.weights.items():
        expected = weight * 100_000 / corpus.domains[name].train.tokens
        assert mixture.epochs[name] == pytest.approx(expected)
        (line,) = [line for line in table.splitlines() if line.startswith(f"{name} ")]
        assert line.endswith(f" {expected:.2f}")


def test_no_domain_is_repeated_more_than_is_allowed(compute, corpus, capsys):
    free = compute(token_budget=100_000)
    assert free.max_epochs is free.unconstrained is free.capped is None
    most = 0.97 * max(free.epochs.values())
    capsys.readouterr()
    mixture = compute(token_budget=100_000, max_epochs=most)
    said = capsys.readouterr().out
    assert mixture.unconstrained == free.weights
    assert mixture.max_epochs == most
    assert mixture.capped
    assert set(mixture.capped) < set(DOMAINS)
    assert f"held at the limit of {most:g} epochs: {', '.join(mixture.capped)}" in said
    for name in DOMAINS:
        share = most * corpus.domains[name].train.tokens / 100_000
        if name in mixture.capped:
            assert mixture.weights[name] == pytest.approx(share)
            assert mixture.epochs[name] == pytest.approx(most)
            assert mixture.intervals[name][1] <= share * (1 + 1e-12)
        else:
            assert mixture.epochs[name] < most
    assert sum(mixture.weights.values()) == pytest.approx(1, abs=1e-12)
    compute(token_budget=100_000, max_epochs=1e6)
    assert "no domain comes to the limit of 1e+06 epochs" in capsys.readouterr().out


def test_some_domains_alone_are_weighed_and_embedded(compute, options, capsys):
    names = [DOMAINS[2], DOMAINS[0]]
    mixture = compute(domains=f"{names[0]}, {names[1]}")
    store = store_beside(options)
    assert set(store.domains) == set(names)
    in_order = [name for name in DOMAINS if name in names]
    expected = chameleon_weights(means_of(store, in_order), "pretrain", "scaled")
    assert mixture.weights == pytest.approx(dict(zip(in_order, expected.weights, strict=True)))
    assert "0 domains reused" in capsys.readouterr().out
    compute()
    assert "2 domains reused" in capsys.readouterr().out


def test_old_domains_keep_their_ratios_and_new_ones_are_placed(compute, options, tmp_path):
    everything = compute()
    old = Mixture({DOMAINS[0]: 0.9, DOMAINS[1]: 0.1})
    old.save(tmp_path / "old.json")
    mixture = compute(keep=tmp_path / "old.json")
    new = DOMAINS[2]
    assert mixture.weights[new] == pytest.approx(everything.weights[new])
    assert mixture.weights[DOMAINS[0]] / mixture.weights[DOMAINS[1]] == pytest.approx(9)
    assert sum(mixture.weights.values()) == pytest.approx(1, abs=1e-12)
    assert mixture.provenance.inputs["kept mixture"] == old.hash
    assert mixture.intervals[new] == pytest.approx(everything.intervals[new])
    low, high = mixture.intervals[DOMAINS[0]]
    assert low < mixture.weights[DOMAINS[0]] < high
    limited = compute(keep=tmp_path / "old.json", token_budget=10_000, max_epochs=0.9)
    assert limited.unconstrained == mixture.weights
    assert limited.capped == [new]
    assert limited.weights[DOMAINS[0]] / limited.weights[DOMAINS[1]] == pytest.approx(9)


def test_the_recipe_and_each_of_its_knobs_reach_the_weights(compute, options):
    compute()
    means = means_of(store_beside(options))
    seen = []
    cases: list[tuple[RecipeOptions, dict[str, Any]]] = [
        (RecipeOptions("paper"), {}),
        (RecipeOptions("reference"), {}),
        (RecipeOptions("scaled", ridge=0.5), {"ridge": 0.5, "ridge_relative": False}),
        (
            RecipeOptions("reference", temperature=50.0),
            {"temperature_pretrain": 50.0, "temperature_relative": False},
        ),
        (
            RecipeOptions("scaled", temperature=3.0),
            {"temperature_pretrain": 3.0, "temperature_relative": False},
        ),
        (RecipeOptions("scaled", center=False), {"center": False}),
        (
            RecipeOptions("reference", normalize=False, ridge=1e-3),
            {"normalize": False, "ridge": 1e-3},
        ),
    ]
    for weighting, overrides in cases:
        given = dataclasses.replace(weighting, bootstrap_resamples=2)
        mixture = compute(weighting=given)
        expected = chameleon_weights(means, "pretrain", weighting.recipe, **overrides)
        assert list(mixture.weights.values()) == pytest.approx(expected.weights, rel=1e-9)
        seen.append(tuple(mixture.weights.values()))
    assert len(set(seen)) == len(seen)


def test_a_given_temperature_is_that_of_either_mode():
    recipe = resolve_options(RecipeOptions("scaled", temperature=3.0))
    assert recipe.temperature_pretrain == recipe.temperature_finetune == 3.0
    assert not recipe.temperature_relative
    assert recipe.ridge_relative  # as in the recipe: no ridge was given


def test_the_second_run_embeds_nothing_and_finds_the_same(compute, options, capsys):
    first = compute()
    assert ", 0 domains reused from " in capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in store_beside(options).root.iterdir()}
    second = compute()
    printed = capsys.readouterr().out
    assert ", 3 domains reused from " in printed
    assert "embedding 0 domains took 0.00e+00 FLOPs" in printed
    assert {p: p.stat().st_mtime_ns for p in store_beside(options).root.iterdir()} == files
    assert second.weights == first.weights
    assert second.intervals == first.intervals


def test_a_new_domain_is_embedded_alone_and_the_old_ones_stay(compute, options, tmp_path, capsys):
    two = write_small_corpus(tmp_path / "two", ("a", "b"))
    three = write_small_corpus(tmp_path / "three", ("a", "b", "c"))
    compute(corpus=two.root)
    store = store_beside(options)
    old = {name: (store.root / store.domains[name].file).read_bytes() for name in "ab"}
    capsys.readouterr()
    mixture = compute(corpus=three.root)
    printed = capsys.readouterr().out
    assert ", 2 domains reused from " in printed
    assert "embedding 1 domains took" in printed
    assert list(mixture.weights) == ["a", "b", "c"]
    for name, content in old.items():
        assert (store.root / store.domains[name].file).read_bytes() == content


def test_a_store_may_lie_elsewhere(compute, tmp_path):
    compute(store=tmp_path / "elsewhere")
    assert set(EmbeddingStore.load(tmp_path / "elsewhere").domains) == set(DOMAINS)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mixture.json"]


def test_a_store_of_another_layer_is_refused(compute, options):
    compute()
    with pytest.raises(UserError, match=r"another layer \(2, now 3\); give another --store"):
        compute(extraction=ExtractionOptions(layer=3, num_windows=WINDOWS))


def test_layer_windows_and_seed_change_the_embeddings(compute, tmp_path):
    weights = set()
    for number, extraction in enumerate(
        [
            ExtractionOptions(num_windows=WINDOWS),
            ExtractionOptions(num_windows=WINDOWS, layer=3),
            ExtractionOptions(num_windows=WINDOWS, window_length=16),
            ExtractionOptions(num_windows=WINDOWS, extraction_seed=1),
            ExtractionOptions(num_windows=30),
        ]
    ):
        mixture = compute(extraction=extraction, store=tmp_path / str(number))
        weights.add(tuple(mixture.weights.values()))
    assert len(weights) == 5


def test_the_batch_size_changes_nothing_to_speak_of(compute, tmp_path):
    by_size = [
        compute(
            extraction=ExtractionOptions(num_windows=WINDOWS, embedding_batch_size=size),
            store=tmp_path / str(size),
        )
        for size in (1, 1000)
    ]
    assert by_size[0].weights == pytest.approx(by_size[1].weights, rel=1e-4)


def test_fewer_windows_than_asked_for_are_told(compute, corpus, capsys):
    mixture = compute(extraction=ExtractionOptions(num_windows=10**6))
    table = capsys.readouterr().out
    for name, windows in mixture.parameters["windows"].items():
        assert 60 < windows <= corpus.domains[name].train.tokens
        assert f"{name:6}  {windows:7d}" in table


def test_the_table_shows_every_domain(compute, capsys):
    mixture = compute()
    printed = capsys.readouterr().out
    assert "layer 2 of 4" in printed
    for name, weight in mixture.weights.items():
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{name} ")]
        low, high = mixture.intervals[name]
        assert f"{weight:.4f}" in line
        assert f"{low:.4f} to {high:.4f}" in line


def test_weights_that_are_bounds_are_told_by_their_domains(compute, tmp_path):
    # Two domains of the very same text lie at the mean of both: their scores are zero.
    corpus = write_small_corpus(tmp_path / "corpus", ("a", "b"))
    twin = dataclasses.replace(corpus, domains={"a": corpus.domains["a"], "b": corpus.domains["a"]})
    twin.save()
    every = ExtractionOptions(num_windows=10**6)  # all windows: the draw depends on the name
    with pytest.warns(DegenerateScoreWarning, match="of 'a', 'b' is so near zero or so high"):
        mixture = compute(corpus=twin.root, extraction=every)
    assert mixture.weights == pytest.approx({"a": 0.5, "b": 0.5}, abs=1e-6)


MISTAKES = [
    ({"weighting": RecipeOptions(ridge=-1.0)}, "--ridge -1.0: give a finite number above 0"),
    ({"weighting": RecipeOptions(ridge=float("nan"))}, "--ridge nan: "),
    ({"weighting": RecipeOptions(temperature=0.0)}, "--temperature 0.0: give a finite"),
    (
        {"weighting": RecipeOptions("scaled", normalize=False)},
        "--recipe scaled and its knobs: .* needs normalize",
    ),
    ({"weighting": RecipeOptions(bootstrap_resamples=1)}, "--bootstrap-resamples 1: give 2 or"),
    ({"weighting": RecipeOptions(confidence=1.0)}, "--confidence 1.0: it lies between 0 and 1"),
    ({"extraction": ExtractionOptions(layer=99)}, "--layer 99: the model has layers 1 to 4; "),
    ({"extraction": ExtractionOptions(layer=0)}, "--layer 0: the model has layers 1 to 4"),
    ({"extraction": ExtractionOptions(window_length=33)}, "--window-length 33: .* 1 to 32 tokens"),
    ({"extraction": ExtractionOptions(num_windows=0)}, "--num-windows 0: give a whole number"),
    ({"extraction": ExtractionOptions(embedding_batch_size=0)}, "--embedding-batch-size 0: "),
    ({"extraction": ExtractionOptions(extraction_seed=-1)}, "--extraction-seed -1: .* from 0 on"),
    ({"weighting": RecipeOptions(precision=0.0)}, "--precision 0.0: give a finite number above 0"),
    ({"token_budget": 0}, "--token-budget 0: give a whole number from 1 on"),
    ({"max_epochs": 4.0}, "--max-epochs limits the epochs of a --token-budget: give that too"),
    ({"max_epochs": 0.0, "token_budget": 9}, "--max-epochs 0.0: give a finite number above 0"),
    (
        {"max_epochs": 2.0, "token_budget": 10**9},
        "--max-epochs 2: .* 1,000,000,000;",
    ),
    ({"domains": "news,prose"}, "--domains news,prose: there is no domain 'prose'; those of"),
    ({"domains": " , "}, "--domains  , : it names no domain; those of"),
    ({"keep": Path("nowhere.json")}, r"nowhere\.json does not exist"),
    ({"checkpoint": Path("nowhere")}, "--checkpoint nowhere: neither a checkpoint nor a run"),
    ({"corpus": Path("nowhere")}, r"nowhere/corpus\.json does not exist; tools/preprocess_data"),
    ({"parallel": ParallelOptions(3)}, r"1 rank\(s\) cannot be laid out as tensor 3"),
    ({"parallel": ParallelOptions(2)}, r"1 rank\(s\) cannot be laid out as tensor 2"),
]


@pytest.mark.parametrize(("changes", "problem"), MISTAKES)
def test_a_mistake_has_one_clear_line_and_writes_nothing(compute, tmp_path, changes, problem):
    with pytest.raises(UserError, match=problem) as refused:
        compute(**changes)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_another_tokenizer_is_refused(compute, tmp_path):
    other = write_small_corpus(tmp_path / "other", tokenizer_hash="9" * 64)
    with pytest.raises(UserError, match=r"trained with another tokenizer than .*--tokenizer-model"):
        compute(corpus=other.root)


def test_a_domain_without_training_text_is_refused(compute, tmp_path):
    corpus = write_small_corpus(tmp_path / "corpus")
    prefix = corpus.prefix("code", "train")
    Path(f"{prefix}.bin").write_bytes(b"")
    Path(f"{prefix}.idx").write_bytes(bytes(index_file_bytes(0)))
    domain = corpus.domains["code"]
    empty = dataclasses.replace(domain.train, documents=0, tokens=0)
    domains = {**corpus.domains, "code": dataclasses.replace(domain, train=empty)}
    dataclasses.replace(corpus, domains=domains).save()
    Corpus.load(corpus.root)
    with pytest.raises(UserError, match=r"domain 'code' of .* has no training tokens to embed"):
        compute(corpus=corpus.root)


def test_a_proxy_that_has_diverged_is_told_and_leaves_no_mixture(compute, trained_run, tmp_path):
    poison_checkpoint(find_checkpoint(trained_run), "decoder.layers.1.mlp.linear_fc2.bias")
    with pytest.raises(UserError, match=r"hidden states after layer 2 are not finite in 60 of 60"):
        compute(checkpoint=trained_run)
    assert not (tmp_path / "out").exists()
    # What lies before the ruined layer can still be used.
    weights = compute(checkpoint=trained_run, extraction=ExtractionOptions(layer=1)).weights
    assert all(weight > 0 for weight in weights.values())


def test_a_damaged_store_says_what_to_delete(compute, options):
    compute()
    store = store_beside(options)
    damaged = store.root / store.domains["code"].file
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1])
    with pytest.raises(UserError, match=rf"cannot read {damaged} .*; delete it and run again"):
        compute()
    damaged.unlink()
    compute()
    assert damaged.read_bytes() == content


def test_planning_reads_and_writes_nothing(options, tmp_path):
    plan = plan_mixture(options())
    assert plan.store == options().output.parent / "embeddings"
    assert plan.embedding.layer == 2
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_strict_json(compute, options):
    compute(weighting=RecipeOptions("reference", bootstrap_resamples=2))  # no ceiling: infinite
    text = options().output.read_text()
    body = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert body["parameters"]["recipe"]["score_ceiling"] is None
