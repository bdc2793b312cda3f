"""What RegMix and Data Mixing Laws share: runs, targets, checks, cross-validation."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_chameleon.artifacts import Corpus, DomainSplit, Mixture, MixtureWarning
from megatron_chameleon.artifacts.mixture_runs import MixtureRunsWarning
from megatron_chameleon.corpus.indexed import IndexedWriter
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods import mixing_laws, regmix
from megatron_chameleon.methods.method import Method
from megatron_chameleon.methods.mixing_laws import LawOptions, MixingLawsOptions
from megatron_chameleon.methods.regmix import RegmixOptions, TreeOptions
from megatron_chameleon.methods.swarm.fit import cross_validated, mixtures_to_train
from megatron_chameleon.methods.swarm.options import (
    FitOptions,
    MixtureSamplingOptions,
    SwarmOptions,
)
from megatron_chameleon.methods.swarm.runs import check_target, swarm_runs, warn_mixed_scales
from megatron_chameleon.mixture.fit_quality import fit_linear, folds_of, held_out_predictions
from megatron_chameleon.mixture.regmix import TreeSettings, fit_trees
from megatron_chameleon.mixture.sampling import sample_mixtures
from megatron_chameleon.training.options import StoppingOptions
from tests.small_corpus import DOMAINS, write_small_corpus
from tests.unit.methods.fit_runs import SWARM, make_options, sampled_runs, swarm_result

METHODS: dict[type[FitOptions], tuple[Method, dict[str, Any]]] = {
    RegmixOptions: (
        regmix.METHOD,
        {"trees": TreeOptions(num_trees=10, num_draws=200, num_best=10)},
    ),
    MixingLawsOptions: (mixing_laws.METHOD, {"laws": LawOptions(num_starts=2)}),
}
both_methods = pytest.mark.parametrize("method", list(METHODS))


def falling(mixtures):
    """Losses [n, 3] that fall with a domain's own share."""
    return 3 - mixtures


@pytest.fixture
def compute(corpus, tmp_path):
    """``compute(method, runs, on=corpus, **changes)``: exit status and options."""

    def run(method, runs=None, on=corpus, **changes):
        entry, quick = METHODS[method]
        options = make_options(method, on, tmp_path, runs, {**quick, **changes})
        return entry.compute(options), options

    return run


def without_valid_split(root: Path, *names: str) -> Corpus:
    """A corpus whose domains ``names`` have empty valid splits."""
    corpus = write_small_corpus(root)
    domains = dict(corpus.domains)
    for name in names:
        prefix = root / "valid" / name
        for suffix in (".bin", ".idx"):
            prefix.with_name(prefix.name + suffix).unlink()
        digest = IndexedWriter(prefix, "uint16").finish()
        empty = DomainSplit(f"valid/{name}", 0, 0, 0, digest)
        domains[name] = dataclasses.replace(domains[name], valid=empty)
    dataclasses.replace(corpus, domains=domains).save()
    return Corpus.load(root)


@both_methods
@pytest.mark.parametrize(
    ("changes", "identifier"),
    [
        ({"target": "songs"}, "songs"),
        ({"target": "news=0"}, "news"),
        ({"target": "news,news"}, "news"),
        ({"target": ","}, "--target"),
        ({"num_proxies": 0}, "--num-proxies 0"),
        ({"num_proxies": 3}, "3 runs"),
        ({"sampling": {"max_upweighting": 0.1}}, "--num-proxies"),
        ({"sampling": {"mixture_seed": -1}}, "--mixture-seed -1"),
        ({"sampling": {"smallest_weight": 0.5}}, "--num-proxies"),
        ({"max_epochs": 2.0}, "--token-budget"),
        ({"ratios": Path("table.csv"), "num_proxies": 512}, "--metrics"),
        ({"metrics": Path("table.csv")}, "--ratios"),
        ({"output": Path("/dev/null/mixture.json")}, "/dev/null"),
        ({"output": Path("mixture")}, "--output mixture"),
    ],
)
def test_mistakes_are_reported_before_training(compute, tmp_path, method, changes, identifier):
    def run(num_proxies=64, sampling=(), **changes):
        options = MixtureSamplingOptions(**dict(sampling))
        compute(method, num_proxies=num_proxies, sampling=options, **changes)

    with pytest.raises(UserError, match=identifier):
        run(**changes)
    assert not list(tmp_path.glob("**/swarm.json"))


@both_methods
@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"num_proxies": 30}, "--num-proxies 30"),
        ({"work_dir": Path("proxies")}, "--work-dir proxies"),
        ({"sampling": MixtureSamplingOptions(mixture_seed=7)}, "--mixture-seed 7"),
        (
            {"swarm": SwarmOptions(stopping=StoppingOptions(exit_duration_in_mins=5.0))},
            "--exit-duration-in-mins 5.0",
        ),
    ],
)
def test_training_options_with_existing_runs_are_rejected(compute, tmp_path, method, changes, flag):
    with pytest.raises(UserError, match=flag):
        compute(method, sampled_runs(falling, 20), **changes)
    assert not (tmp_path / "out").exists()


@both_methods
def test_what_cannot_be_measured_or_weighed_is_rejected(compute, tmp_path, method):
    corpus = without_valid_split(tmp_path / "poems", "poems")
    check_target("news,code", corpus)
    check_target(None, corpus)
    with pytest.raises(UserError, match="--target news,poems"):
        compute(method, on=corpus, target="news,poems", num_proxies=16)
    nothing = without_valid_split(tmp_path / "all", *DOMAINS)
    with pytest.raises(UserError, match="--split"):
        compute(method, on=nothing, num_proxies=16)
    with pytest.raises(UserError, match="one domain"):
        compute(method, on=write_small_corpus(tmp_path / "one", ("news",)))


@both_methods
def test_a_stopped_swarm_leaves_no_mixture_and_status_75(compute, method):
    at_once = dataclasses.replace(SWARM, stopping=StoppingOptions(exit_duration_in_mins=1e-9))
    status, options = compute(method, swarm=at_once, num_proxies=12)
    assert status == STOPPED_STATUS
    assert not options.output.exists()


@both_methods
def test_rank_0_fits_existing_runs(compute, method, monkeypatch):
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        status, options = compute(method, sampled_runs(falling, 20))
        assert not status  # the same on every rank
        assert options.output.exists() == (rank == "0")


def test_columns_are_matched_to_domains_and_reported(compute, tmp_path):
    runs = sampled_runs(falling, 20)
    rows = [f"x{n},{c},{a},{p}\n" for n, (a, c, p) in enumerate(runs.mixtures)]
    (tmp_path / "r.csv").write_text("run,Code,train_news,poems\n" + "".join(rows))
    rows = [f"x{n},{a},0.5\n" for n, (a, _c, _p) in enumerate(runs.losses)]
    (tmp_path / "m.csv").write_text("run,metric/news_val_loss,arc_bpb\n" + "".join(rows))
    tables = {"ratios": tmp_path / "r.csv", "metrics": tmp_path / "m.csv"}
    _, options = compute(RegmixOptions, target="news", **tables)
    mixture = Mixture.load(options.output)
    assert mixture.parameters["renamed_columns"] == {
        "ratios": {"Code": "code", "train_news": "news"},
        "metrics": {"metric/news_val_loss": "news"},
    }
    assert list(mixture.weights) == list(DOMAINS)
    assert set(mixture.parameters["fit"]["mae"]) == {"news", "arc_bpb"}
    with pytest.raises(UserError, match="songs"):
        compute(RegmixOptions, sampled_runs(falling, 20, ("news", "code", "songs")))


def test_runs_with_gaps_are_left_out(compute):
    _, options = compute(RegmixOptions, sampled_runs(falling, 20))
    table = options.metrics.read_text().splitlines()
    table[5] = table[5].rpartition(",")[0] + ",nan"
    options.metrics.write_text("\n".join(table) + "\n")
    with pytest.warns(MixtureRunsWarning, match="1 of 20 runs"):
        compute(RegmixOptions, ratios=options.ratios, metrics=options.metrics)
    assert Mixture.load(options.output).parameters["runs"] == 19


def with_metric(runs, name, values):
    losses = np.column_stack([runs.losses, values])
    return dataclasses.replace(runs, metrics=[*runs.metrics, name], losses=losses)


def test_a_target_of_metrics_of_mixed_scales_gives_a_warning(compute, recwarn):
    runs = sampled_runs(falling, 20)
    mixed = with_metric(runs, "accuracy", np.random.default_rng(0).uniform(0.2, 0.4, 20))
    with pytest.warns(MixtureWarning, match="accuracy"):
        compute(RegmixOptions, mixed)
    for target in (None, "news,accuracy"):
        with pytest.warns(MixtureWarning, match="accuracy"):
            warn_mixed_scales(target, mixed, "m.csv")
    recwarn.clear()
    warn_mixed_scales(None, runs, "m.csv")
    warn_mixed_scales("news,code", mixed, "m.csv")
    warn_mixed_scales("news=1,accuracy=10", mixed, "m.csv")  # explicit shares
    assert not recwarn.list


def test_domains_in_few_mixtures_are_reported_before_training(corpus, tmp_path, monkeypatch):
    options = make_options(RegmixOptions, corpus, tmp_path, None, {"num_proxies": 32})
    rare = write_small_corpus(tmp_path / "corpus")
    tokens = {"news": 100_000, "code": 60_000, "poems": 1}
    monkeypatch.setattr(type(rare), "train_tokens", property(lambda _: tokens))
    for tokens["poems"], problem in ((1, "no run"), (20, "fewer than 5 runs")):
        with pytest.warns(MixtureWarning, match=f"{problem} .* poems"):
            mixtures_to_train(options, rare)
    tokens["poems"] = 0  # never sampled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixtures = mixtures_to_train(options, rare)
    np.testing.assert_array_equal(mixtures, mixtures_to_train(options, rare))


def test_diverged_members_are_left_out_of_the_fit(tmp_path):
    result = swarm_result(diverged=[2, 7])
    result.losses[:, :, 1] = np.nan  # a domain without held-out text is no metric
    result.mixtures[:, 2] *= np.isin(np.arange(20), [2, 7])
    with pytest.warns(MixtureWarning) as caught:
        runs = swarm_runs(result, result.losses[:, -1], [tmp_path], 1.0)
    messages = [str(warning.message) for warning in caught]
    assert any("2 of 20 proxies" in message for message in messages)
    assert any("poems" in message for message in messages)
    assert runs.runs.keys == [str(n) for n in range(20) if n not in (2, 7)]
    np.testing.assert_array_equal(runs.runs.mixtures, np.delete(result.mixtures, [2, 7], 0))
    assert runs.runs.metrics == ["news", "poems"]
    assert np.isfinite(runs.runs.losses).all()
    assert (runs.parameters["diverged"], runs.cost) == ([2, 7], result.cost)
    with pytest.raises(UserError, match="--lr"):
        swarm_runs(swarm_result(range(20)), result.losses[:, -1], [tmp_path], 1.0)


def cross_validation_of_noise(noise, shares):
    """Five domains, each better the more of it there is, so that their mean is noise."""
    mixtures = sample_mixtures(np.full(5, 0.2), 64, 0)
    losses = 3 - 0.5 * mixtures + np.random.default_rng(0).normal(0, noise, (64, 5))
    folds = folds_of(64, 5, 42)
    settings = TreeSettings(num_trees=300)
    fit, linear = (
        held_out_predictions(method, mixtures, losses, folds)
        for method in (lambda x, y: fit_trees(x, y, settings), fit_linear)
    )
    return cross_validated(fit, linear, losses, shares, "5-fold cross-validation")


def test_the_verdict_is_on_the_target_not_on_its_losses():
    found = cross_validation_of_noise(0.03, np.full(5, 0.2))
    assert (found.fit.spearman > 0.55).all()
    assert found.fit.mae.mean() < 0.5 * found.fit.spread.mean()
    assert "constant" in str(found.verdict)
    assert found.lines(list("abcde"), np.full(5, 0.2), "remedy")[-1].endswith("remedy")
    target = found.parameters(list("abcde"))["target"]
    assert target["mae"] > target["mae_of_a_constant"] > 0
    one = np.array([1.0, 0, 0, 0, 0])
    found = cross_validation_of_noise(0.03, one)
    assert "linear" in str(found.verdict)
    exact = np.random.default_rng(1).normal(size=(9, 5))
    assert cross_validated(exact, exact + 1, exact, one, "x").verdict is None


def test_a_constant_loss_is_written_as_plain_json(compute):
    runs = sampled_runs(falling, 20)
    constant = dataclasses.replace(runs, losses=runs.losses * [1, 1, 0] + [0, 0, 3.0])
    _, options = compute(RegmixOptions, constant)
    text = options.output.read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the file"))
    assert Mixture.load(options.output).parameters["fit"]["spearman"]["poems"] is None
