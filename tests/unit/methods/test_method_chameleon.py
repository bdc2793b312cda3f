"""tools/compute_mixture.py on one rank: from corpus and proxy to mixture.json."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    EmbeddingStore,
    Mixture,
    find_checkpoint,
)
from megatron_chameleon.methods.leverage.plan import resolve_options
from megatron_chameleon.mixture import (
    RECIPES,
    DegenerateScoreWarning,
    bootstrap_weights,
    chameleon_weight_fn,
    chameleon_weights,
)
from megatron_chameleon.model.paper_flops import paper_parameters
from megatron_chameleon.options.mixture import ExtractionOptions, RecipeOptions
from tests.distributed.launch import flags
from tests.small_corpus import DOMAINS, write_small_corpus
from tests.unit.methods.chameleon_runs import (
    RESAMPLES,
    SCALED,
    WINDOWS,
    compute,
    means_of,
    options,
    store_beside,
)

__all__ = ["compute", "options"]  # fixtures


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


def test_the_same_command_writes_the_same_bytes(compute, options, tmp_path, monkeypatch):
    """In this process and in a fresh one, whose sets and dictionaries hash differently."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    given = options(output=Path("mixture.json"))
    tool = Path(__file__).resolve().parents[3] / "tools" / "compute_mixture.py"
    subprocess.run(
        [sys.executable, str(tool), *flags(given)],
        cwd=there,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
    )
    monkeypatch.chdir(here)
    compute(output=given.output)
    one, other = ((folder / "mixture.json").read_text() for folder in (here, there))
    assert without_times(one) == without_times(other)
    ours, theirs = (EmbeddingStore.load(folder / "embeddings") for folder in (here, there))
    for name in DOMAINS:
        np.testing.assert_array_equal(ours.vectors(name), theirs.vectors(name))


def without_times(text):
    """The text of a mixture without what differs by the clock: its provenance and cost."""
    record = json.loads(text)
    del record["provenance"], record["cost"]
    return json.dumps(record)


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
