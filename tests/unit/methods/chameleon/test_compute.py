"""Chameleon on one rank: from corpus and proxy to mixture.json."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Corpus,
    EmbeddingStore,
    Mixture,
    Split,
    find_checkpoint,
)
from megatron_chameleon.artifacts.checkpoint import checkpoint_folders
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.import_corpus import import_corpus
from megatron_chameleon.corpus.options import ImportOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon import (
    ChameleonOptions,
    ExtractionOptions,
    WeightingOptions,
)
from megatron_chameleon.methods.chameleon import weigh as weigh_module
from megatron_chameleon.methods.chameleon.compute import compute_mixture
from megatron_chameleon.methods.chameleon.explain import explain
from megatron_chameleon.methods.chameleon.weigh import (
    Weighting,
    shrunk,
    warn_one_hot,
    weigh_means,
)
from megatron_chameleon.methods.limits import EpochLimit, KeptRatios
from megatron_chameleon.methods.output import ONE_HOT, format_weight
from megatron_chameleon.mixture import (
    RECIPES,
    DegenerateScoreWarning,
    bootstrap,
    bootstrap_weights,
    chameleon_weights,
)
from megatron_chameleon.mixture.shrinkage import effective_directions
from megatron_chameleon.mixture.target import similarity_shares, target_prior
from megatron_chameleon.model.flops import paper_parameters
from megatron_chameleon.parallel.options import ParallelOptions
from tests.distributed.launch import flags
from tests.small_corpus import DOMAINS

WINDOWS, RESAMPLES = 60, 100
EVERY_WINDOW = ExtractionOptions(num_windows=10**6)
# The proxy is barely trained, so its scores would be near zero with the reference recipe's ridge.
SCALED = WeightingOptions(recipe="scaled", bootstrap_resamples=RESAMPLES)
TARGETED = WeightingOptions("reference", ridge=0.01, bootstrap_resamples=RESAMPLES)


@pytest.fixture(scope="module")
def inputs(numbers_corpus, finished_run, tmp_path_factory):
    """Paths of a corpus (its words are token ids), of a proxy, and of an embedding store."""
    root = tmp_path_factory.mktemp("inputs")
    run = shutil.copytree(finished_run, root / "run")
    for folder in checkpoint_folders(run):
        record = CheckpointRecord.load(folder)
        dataclasses.replace(record, tokenizer_hash=numbers_corpus.tokenizer.sha256).save()
    return {"corpus": numbers_corpus.root, "checkpoint": run, "store": root / "embeddings"}


@pytest.fixture
def compute(inputs, tmp_path):
    """``compute(**changes)``: run the method and load its mixture."""

    def run(**changes):
        options = ChameleonOptions(
            **{
                **inputs,
                "output": tmp_path / "out" / "mixture.json",
                "extraction": ExtractionOptions(num_windows=WINDOWS),
                "weighting": SCALED,
                **changes,
            }
        )
        compute_mixture(options)
        return Mixture.load(options.output)

    return run


def means_of(folder, names=DOMAINS):
    store = EmbeddingStore.load(folder)
    return np.stack([store.vectors(name).astype(np.float64).mean(axis=0) for name in names])


def values(by_domain):
    return np.array(list(by_domain.values()))


@pytest.mark.parametrize("mode", ["pretrain", "finetune"])
def test_mixture_is_computed_from_the_mean_embeddings(compute, numbers_corpus, inputs, mode):
    mixture = compute(mode=mode)
    expected = chameleon_weights(means_of(inputs["store"]), mode, "scaled")
    assert list(mixture.weights) == list(DOMAINS)
    np.testing.assert_allclose(values(mixture.weights), expected.weights, rtol=1e-9)
    np.testing.assert_allclose(values(mixture.scores), expected.scores, rtol=1e-9)
    np.testing.assert_allclose(mixture.affinity, expected.affinity, rtol=1e-9, atol=1e-12)
    assert mixture.method == f"chameleon-{mode}"
    record = CheckpointRecord.load(find_checkpoint(inputs["checkpoint"]))
    assert mixture.provenance.inputs == {"corpus": numbers_corpus.hash, "checkpoint": record.hash}
    trained, embedded = sum(record.domain_tokens.values()), WINDOWS * len(DOMAINS) * 32
    expected_parameters = {
        "recipe": dataclasses.asdict(RECIPES["scaled"]),
        "effective_ridge": pytest.approx(expected.effective_ridge),
        "effective_dimension": pytest.approx(expected.effective_dimension),
        "windows": dict.fromkeys(DOMAINS, WINDOWS),
        "paper_flops": paper_parameters("nano") * 2 * embedded,
        "paper_flops_of_proxy": paper_parameters("nano") * 6 * trained,
    }
    assert {key: mixture.parameters[key] for key in expected_parameters} == expected_parameters
    embedding = mixture.parameters["embedding"]
    assert (embedding["layer"], embedding["window_length"]) == (2, 32)  # the default values


def test_intervals_are_those_of_the_bootstrap_over_windows(compute, inputs):
    mixture = compute(weighting=dataclasses.replace(SCALED, confidence=0.8))
    store = EmbeddingStore.load(inputs["store"])
    expected = bootstrap_weights(
        [store.vectors(name) for name in DOMAINS],
        lambda embeddings: chameleon_weights(embeddings, "pretrain", "scaled").weights,
        num_resamples=RESAMPLES,
        seed=0,
        confidence=0.8,
    )
    found = values(mixture.intervals)
    np.testing.assert_allclose(found, np.column_stack([expected.low, expected.high]), rtol=1e-9)
    assert mixture.confidence == 0.8
    ranked = sorted(DOMAINS, key=mixture.weights.get, reverse=True)
    assert [(one, other) for one, other, _ in mixture.outweighs] == list(itertools.pairwise(ranked))
    assert all(0.5 < likely <= 1 for _, _, likely in mixture.outweighs)


def test_weights_of_a_proxy_that_hardly_separates_the_domains_are_shrunk(
    compute, inputs, monkeypatch
):
    compute()  # fills the store
    # The fixture's proxy may lie on either side of the limits, so they are moved around it.
    directions = effective_directions(means_of(inputs["store"]))
    monkeypatch.setattr(weigh_module, "shrinkage_factor", lambda r, k: 0.3 * r / directions)
    with pytest.warns(UserWarning, match="--shrink, which multiplies log weights by 0.30"):
        plain = compute()
    with pytest.warns(UserWarning, match="multiplied log weights by 0.30"):
        shrunk = compute(weighting=dataclasses.replace(SCALED, shrink=True))
    for mixture, is_shrunk in ((plain, False), (shrunk, True)):
        assert mixture.parameters["effective_directions"] == pytest.approx(directions)
        assert mixture.parameters["shrinkage_factor"] == pytest.approx(0.3)
        assert mixture.parameters["is_shrunk"] == is_shrunk
    assert shrunk.scores == plain.scores

    def logs(weights):
        return np.log(weights) - np.log(weights).mean(axis=0)

    one, other = values(plain.weights), values(shrunk.weights)
    np.testing.assert_allclose(logs(other), 0.3 * logs(one), rtol=1e-9)
    assert (np.diff(values(shrunk.intervals)) < np.diff(values(plain.intervals))).all()


def test_with_factor_0_the_intervals_are_those_of_the_prior(
    compute, numbers_corpus, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(weigh_module, "shrinkage_factor", lambda _r, _k: 0.0)
    settings = {"weighting": dataclasses.replace(SCALED, shrink=True)}
    with pytest.warns(UserWarning, match="by 0.00"):
        uniform = compute(**settings)
    assert values(uniform.intervals) == pytest.approx(1 / len(DOMAINS))
    assert "widest interval: +-0: " in capsys.readouterr().out
    path = tmp_path / "target.txt"
    path.write_text(" ".join(texts_of(numbers_corpus, "poems", 5)))
    with pytest.warns(UserWarning, match="by 0.00"):
        targeted = compute(target=f"text={path}", **settings)
    prior = targeted.parameters["target"]["prior"]
    assert values(targeted.weights) == pytest.approx(values(prior) / len(DOMAINS))
    low, high = values(targeted.intervals).T
    # The prior is computed from the resampled windows, so it differs between resamples.
    assert (low < high).all()


def test_a_fresh_process_writes_the_same_bytes(compute, inputs, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    compute(output=here / "mixture.json", store=None)
    options = ChameleonOptions(
        corpus=inputs["corpus"],
        checkpoint=inputs["checkpoint"],
        output=there / "mixture.json",
        extraction=ExtractionOptions(num_windows=WINDOWS),
        weighting=SCALED,
    )
    tool = Path(__file__).resolve().parents[4] / "tools" / "compute_mixture.py"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, str(tool), *flags(options)], env=environment, check=True)
    one, other = (json.loads((f / "mixture.json").read_text()) for f in (here, there))
    for record in (one, other):
        del record["provenance"], record["cost"]
    assert json.dumps(one) == json.dumps(other)
    for path in (here / "embeddings").glob("*.safetensors"):
        assert path.read_bytes() == (there / "embeddings" / path.name).read_bytes()


def test_uninformative_weights_raise_warnings(compute):
    # Two domains are symmetric about their mean, so centered embeddings give equal weights.
    with pytest.warns(UserWarning, match="two domains get the same weight"):
        compute(domains=f"{DOMAINS[0]},{DOMAINS[1]}")
    with pytest.warns(UserWarning, match="nearly all of the weight"):
        compute(weighting=dataclasses.replace(SCALED, temperature=1e-3))


def weighting_of(mode, options, num_domains):
    names = [f"d{number}" for number in range(num_domains)]
    limit = EpochLimit(dict.fromkeys(names, 1000), None, None)
    return Weighting(names, mode, options.resolve(), options, 0, None, None, limit)


def one_hot_means(num_domains, width=16):
    """Domain 1 has a score near 0: it is near the mean of the domains, or, of two, short."""
    means = 5 * np.random.default_rng(3).normal(size=(num_domains, width))
    means[1] = np.delete(means, 1, axis=0).mean(axis=0) + 0.5 if num_domains > 2 else means[1] / 10
    return means


@pytest.mark.parametrize(
    ("num_domains", "mode", "changes", "flag"),
    [
        (8, "pretrain", {}, "--temperature"),
        (8, "pretrain", {"recipe": "scaled"}, "--temperature"),
        (8, "pretrain", {"shrink": True}, "--temperature"),
        (200, "pretrain", {}, "--recipe scaled"),
        (2, "pretrain", {"recipe": "paper", "ridge": 100.0}, "--temperature"),
        (8, "finetune", {"temperature": 1e-4}, "--temperature"),
    ],
)
def test_the_option_that_a_warning_names_limits_the_largest_weight(
    num_domains, mode, changes, flag
):
    options, means = WeightingOptions(**changes), one_hot_means(num_domains)
    weighting = weighting_of(mode, options, num_domains)
    plain = weigh_means(means, mode, weighting.recipe)
    factor = 0.9 if options.shrink else 1.0
    assert shrunk(plain, factor).weights.max() > ONE_HOT
    with pytest.warns(UserWarning, match=f"'d{plain.weights.argmax()}' .*{flag}") as caught:
        warn_one_hot(weighting, plain, means, factor, shrunk(plain, factor).weights[None])
    [(named, value)] = re.findall(r"pass --(\S+) (\S+) \(", str(caught[0].message))
    change: dict[str, Any] = {named: float(value) if named == "temperature" else value}
    changed = dataclasses.replace(options, **change)
    found = shrunk(weigh_means(means, mode, changed.resolve()), factor)
    assert found.weights.max() <= max(0.5, 1.5 / num_domains) + 1e-6


def test_no_option_is_named_if_the_score_of_a_domain_is_0():
    options, means = WeightingOptions(), one_hot_means(8)
    means[1] = np.delete(means, 1, axis=0).mean(axis=0)
    weighting = weighting_of("pretrain", options, 8)
    plain = weigh_means(means, "pretrain", weighting.recipe)
    assert weighting.spread(plain, means, 1.0) is None


def test_ratios_that_the_user_keeps_raise_no_warning():
    means = np.eye(8)
    kept = KeptRatios(np.array([0.99] + [0.01 / 7] * 7), np.ones(8, bool))
    weighting = dataclasses.replace(weighting_of("pretrain", WeightingOptions(), 8), kept=kept)
    plain = weigh_means(means, "pretrain", weighting.recipe)
    weights = weighting.adjust(plain, 1.0)
    assert weights.max() == pytest.approx(0.99)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_one_hot(weighting, plain, means, 1.0, weights[None])


def test_no_domain_is_named_if_each_resample_has_another():
    means = np.eye(8)
    weighting = weighting_of("pretrain", WeightingOptions(), 8)
    plain = weigh_means(means, "pretrain", weighting.recipe)
    with pytest.warns(UserWarning, match="one domain .* in most resamples"):
        warn_one_hot(weighting, plain, means, 1.0, np.eye(8))


def test_the_epoch_limit_caps_weights_and_intervals(compute, numbers_corpus):
    tokens, budget = numbers_corpus.train_tokens, 100_000
    free = compute(token_budget=budget)
    most = 0.97 * max(free.epochs.values())
    limited = compute(token_budget=budget, max_epochs=most)
    for mixture in (free, limited):
        epochs = {name: weight * budget / tokens[name] for name, weight in mixture.weights.items()}
        assert mixture.epochs == pytest.approx(epochs)
    assert limited.unconstrained == free.weights
    assert limited.capped == [name for name in DOMAINS if limited.epochs[name] > 0.999 * most]
    assert 0 < len(limited.capped) < len(DOMAINS)
    for name in limited.capped:
        assert limited.epochs[name] == pytest.approx(most)
        assert limited.intervals[name][1] <= most * tokens[name] / budget * (1 + 1e-12)


def test_kept_domains_retain_their_ratios(compute, tmp_path):
    everything = compute()
    old = Mixture({DOMAINS[0]: 0.9, DOMAINS[1]: 0.1})
    old.save(tmp_path / "old.json")
    mixture = compute(keep=tmp_path / "old.json")
    new = DOMAINS[2]
    assert mixture.weights[new] == pytest.approx(everything.weights[new])
    assert mixture.intervals[new] == pytest.approx(everything.intervals[new])
    assert mixture.weights[DOMAINS[0]] / mixture.weights[DOMAINS[1]] == pytest.approx(9)
    assert mixture.provenance.inputs["kept mixture"] == old.hash
    limited = compute(keep=tmp_path / "old.json", token_budget=10_000, max_epochs=0.9)
    assert limited.capped == [new]
    assert limited.weights[DOMAINS[0]] / limited.weights[DOMAINS[1]] == pytest.approx(9)


def test_hyperparameters_replace_those_of_the_recipe(compute, inputs):
    changes: dict[str, Any] = {"ridge": 0.5, "temperature": 3.0, "center": False}
    mixture = compute(weighting=dataclasses.replace(SCALED, bootstrap_resamples=2, **changes))
    overrides: dict[str, Any] = {"ridge": 0.5, "ridge_relative": False, "center": False}
    overrides |= {"temperature_pretrain": 3.0, "temperature_relative": False}
    expected = chameleon_weights(means_of(inputs["store"]), "pretrain", "scaled", **overrides)
    np.testing.assert_allclose(values(mixture.weights), expected.weights, rtol=1e-9)
    assert mixture.parameters["recipe"].items() >= overrides.items()


def test_store_is_reused_and_extended(compute, tmp_path, capsys):
    """Only new domains are embedded; runs with other selections of domains share the store."""
    folder = tmp_path / "out" / "embeddings"  # default of --store
    compute(store=None, domains="news,code")
    assert ", 0 domains reused from " in capsys.readouterr().out
    first = compute(store=None)
    assert ", 2 domains reused from " in capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert compute(store=None).intervals == first.intervals
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == files
    some = compute(store=None, domains="poems, news")
    expected = chameleon_weights(means_of(folder, ["news", "poems"]), "pretrain", "scaled")
    assert list(some.weights) == ["news", "poems"]
    np.testing.assert_allclose(values(some.weights), expected.weights, rtol=1e-9)
    damaged = folder / EmbeddingStore.load(folder).domains["code"].file
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1])
    with pytest.raises(UserError, match=re.escape(str(damaged))):
        compute(store=None)
    damaged.unlink()
    compute(store=None)
    assert damaged.read_bytes() == content


def test_a_second_proxy_has_its_own_default_store(compute, inputs, tmp_path):
    other, one = checkpoint_folders(inputs["checkpoint"])
    first = [compute(store=None, checkpoint=proxy) for proxy in (one, other)]
    again = [compute(store=None, checkpoint=proxy) for proxy in (one, other)]
    assert [each.weights for each in again] == [each.weights for each in first]
    assert first[0].weights != first[1].weights
    suffix = CheckpointRecord.load(other).hash[:8]
    folders = [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()]
    assert sorted(folders) == ["embeddings", f"embeddings-{suffix}"]


def test_extraction_options(compute, inputs, tmp_path):
    """All options except the batch size change the embeddings; bfloat16 changes them little."""
    compute()
    exact = means_of(inputs["store"])
    for option, value, low, high in (
        ("layer", 3, 1e-3, math.inf),
        ("window_length", 16, 1e-3, 1),
        ("extraction_seed", 1, 1e-3, 1),
        ("num_windows", 30, 1e-3, 1),
        ("embedding_dtype", "bfloat16", 1e-5, 2e-2),
        ("embedding_batch_size", 7, 0, 1e-5),
    ):
        extraction = ExtractionOptions(**{"num_windows": WINDOWS, option: value})  # type: ignore[arg-type]
        compute(extraction=extraction, store=tmp_path / option)
        difference = np.linalg.norm(means_of(tmp_path / option) - exact, axis=1)
        assert low <= max(difference / np.linalg.norm(exact, axis=1)) < high


def test_many_domains(compute, monkeypatch):
    """With many domains, no affinity matrix is stored, and the bootstrap groups windows."""
    whole = compute()
    monkeypatch.setattr(weigh_module, "MAX_AFFINITY_DOMAINS", 2)
    monkeypatch.setattr(bootstrap, "MAX_VALUES", len(DOMAINS) * WINDOWS // 2 * 64)
    grouped = compute()
    assert grouped.affinity is None
    assert grouped.parameters["bootstrap_group"] == 2
    assert grouped.parameters["windows"] == whole.parameters["windows"]
    assert grouped.weights == whole.weights
    widths = [np.diff(values(each.intervals)) for each in (whole, grouped)]
    assert np.median(widths[1] / widths[0]) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weighting": WeightingOptions("scaled", normalize=False)}, "--recipe"),
        ({"extraction": ExtractionOptions(layer=99)}, "--layer 99"),
        ({"target_strength": 0.5}, "--target-strength"),
        ({"parallel": ParallelOptions(2)}, "tensor 2"),
        ({"target": "poems", "domains": "news,code"}, "'poems'"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(compute, tmp_path, changes, named):
    with pytest.raises(UserError, match=re.escape(named)) as error:
        compute(**changes)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["pretrain", "finetune"])
def test_a_target_of_domains(compute, inputs, capsys, mode):
    plain = compute(mode=mode, weighting=TARGETED)
    settings = {"target": "code=3, poems", "target_strength": 0.4, "weighting": TARGETED}
    mixture = compute(mode=mode, explain=True, **settings)
    prior = target_prior([0, 3, 1], 0.4)
    means = means_of(inputs["store"])
    expected = chameleon_weights(means, mode, prior=prior, ridge=0.01, ridge_relative=False)
    assert list(mixture.weights.values()) == pytest.approx(expected.weights, rel=1e-9)
    assert max(abs(mixture.weights[name] - plain.weights[name]) for name in DOMAINS) > 0.01
    assert mixture.parameters["target"] == {
        "value": "code=3, poems",
        "shares": {"code": 0.75, "poems": 0.25},
        "windows": 0,
        "strength": 0.4,
        "prior": pytest.approx(dict(zip(DOMAINS, prior, strict=True))),
        "weights_without": plain.weights,
    }
    printed = capsys.readouterr().out
    assert f"{prior[1]:.2f}" in next(row for row in printed.splitlines() if "2 code" in row)


def test_a_target_without_effect_raises_a_warning(compute):
    plain = compute(weighting=TARGETED)
    with pytest.warns(UserWarning, match="no effect"):
        equal = compute(target="news,code,poems", weighting=TARGETED)
    assert (equal.weights, equal.intervals) == (plain.weights, plain.intervals)
    small = dataclasses.replace(TARGETED, ridge=1e-7, center=False)
    with pytest.warns(UserWarning, match="larger --ridge"):
        compute(target="news", weighting=small, mode="finetune")


def texts_of(
    corpus: Corpus, name: str, count: int | None = None, split: Split = "train"
) -> list[str]:
    """Return the first ``count`` documents of a domain's split, as text."""
    tokens = open_domains(corpus).open(name, split)
    documents = [tokens.get(number)[:-1] for number in range(count or len(tokens))]
    return [" ".join(map(str, document.tolist())) for document in documents]


def test_a_target_text_is_embedded_like_a_domain(compute, numbers_corpus, tmp_path):
    path, store = tmp_path / "all.jsonl", tmp_path / "store"
    lines = [json.dumps({"text": text}) for text in texts_of(numbers_corpus, "poems")]
    path.write_text("\n".join(lines))
    settings = {"extraction": EVERY_WINDOW, "store": store, "weighting": TARGETED}
    mixture = compute(target=f"text={path}", **settings)
    means, target = means_of(store), mixture.parameters["target"]
    expected = target_prior(similarity_shares(means, means[2]), 0.5)
    assert list(target["prior"].values()) == pytest.approx(expected, rel=1e-4)
    assert max(target["prior"], key=target["prior"].get) == "poems"
    assert mixture.weights["poems"] > target["weights_without"]["poems"]
    assert mixture.cost.flops > 0  # every run embeds the target text


def test_a_held_out_target_is_embedded_like_a_target_text(compute, numbers_corpus, tmp_path):
    held_out, store = tmp_path / "held-out", tmp_path / "store"
    import_corpus(ImportOptions(held_out, corpus=numbers_corpus.root, held_out="poems"))
    path = tmp_path / "poems.jsonl"
    lines = [json.dumps({"text": t}) for t in texts_of(numbers_corpus, "poems", split="valid")]
    path.write_text("\n".join(lines))
    settings = {"corpus": held_out, "extraction": EVERY_WINDOW, "weighting": TARGETED}
    by_name = compute(target="poems", store=store, **settings)
    by_text = compute(target=f"text={path}", store=store, **settings)
    assert [*by_name.weights] == ["news", "code"]
    for field in ("prior", "weights_without"):
        expected = by_text.parameters["target"][field]
        assert by_name.parameters["target"][field] == pytest.approx(expected, rel=1e-6)
    assert by_name.parameters["target"]["windows"] == by_text.parameters["target"]["windows"]
    assert by_name.weights == pytest.approx(by_text.weights, rel=1e-6)
    # The store keeps the vectors of the held-out text, and not of another split of its name.
    assert [*EmbeddingStore.load(store).domains] == ["news", "code", "poems/valid"]
    shares = compute(target="news=1,poems=3", store=store, **settings).parameters["target"]
    means, poems = means_of(store, ["news", "code"]), means_of(store, ["poems/valid"])[0]
    similar = similarity_shares(means, poems)
    expected = target_prior(3 * similar / similar.sum() + [1, 0], 0.5)
    assert [*shares["prior"].values()] == pytest.approx(expected.tolist())
    with pytest.raises(UserError, match="'poems' is held out"):
        compute(domains="news,poems", store=store, **settings)


@pytest.mark.parametrize("mode", ["pretrain", "finetune"])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_explain_shows_the_weights_after_each_change(mode, name):
    recipe, names = RECIPES[name], ["books", "code", "a-domain-with-a-long-name", "wiki", "chat"]
    means = 3 * np.random.default_rng(5).normal(size=(5, 16)) + 5

    def weigh(recipe):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DegenerateScoreWarning)
            return chameleon_weights(means, mode, recipe)

    text, temperature = explain(names, recipe, weigh), f"temperature_{mode}"
    changes = [
        {},
        *({"ridge": recipe.ridge * factor} for factor in (0.1, 10)),
        *({temperature: getattr(recipe, temperature) * factor} for factor in (0.5, 2)),
        {"center": not recipe.center},
        *([] if recipe.temperature_relative else [{"normalize": not recipe.normalize}]),
    ]
    columns = [weigh(dataclasses.replace(recipe, **change)).weights for change in changes]
    rows = [row.split() for row in text.splitlines() if row.startswith("2 code ")]
    assert rows[1][2:] == [format_weight(column[1]) for column in columns]
    moved = [f"{np.abs(c - columns[0]).sum() / 2:.1%}" for c in columns]
    assert text.splitlines()[-1].split()[1:] == moved
