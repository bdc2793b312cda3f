"""--method regmix, mixing-laws and surrogate, from swarms or tables to mixture.json."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from megatron_chameleon.artifacts import Cost, Mixture, MixtureWarning
from megatron_chameleon.artifacts.swarm import MemberRecord, SwarmRecord, member_path
from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange.mixture_runs import MixtureRuns, write_mixture_runs
from megatron_chameleon.methods.method import find_methods
from megatron_chameleon.methods.mixing_laws import LawOptions, MixingLawsOptions, layer_parameters
from megatron_chameleon.methods.mixing_laws.compute import MixingLawsFit
from megatron_chameleon.methods.options import PriorOptions
from megatron_chameleon.methods.regmix import RegmixOptions, TreeOptions
from megatron_chameleon.methods.regmix.compute import Regmix
from megatron_chameleon.methods.surrogate import OptimumOptions, SurrogateOptions
from megatron_chameleon.methods.surrogate.compute import SurrogateFit
from megatron_chameleon.methods.swarm import CollectOptions, MixtureSamplingOptions, sampling
from megatron_chameleon.methods.swarm.any_trainer import collect_swarm
from megatron_chameleon.methods.swarm.fit import FitMethod
from megatron_chameleon.methods.swarm.folder import SwarmResult
from megatron_chameleon.methods.swarm.quality import cross_validation, fit_problems
from megatron_chameleon.methods.swarm.runs import swarm_runs, warn_untrained
from megatron_chameleon.methods.swarm.sampling import mixtures_to_train
from megatron_chameleon.methods.swarm.space import SearchSpace
from megatron_chameleon.mixture.fit_quality import fit_linear, folds_of, held_out_predictions
from megatron_chameleon.mixture.mixing_laws import MixingLaws, simplex_grid
from megatron_chameleon.mixture.regmix import TreeSettings, fit_trees, sample_mixtures
from megatron_chameleon.model.config import PRESETS
from tests.small_corpus import DOMAINS
from tests.unit.methods.swarm import small_swarm

SWARM = dataclasses.replace(small_swarm.SWARM, eval_interval=1)
CUT = dataclasses.replace(SWARM, target_tokens=2000)
SAMPLING = MixtureSamplingOptions(smallest_weight=0.05)
TREES = TreeOptions(num_trees=100, tree_learning_rate=0.1, num_draws=3000, num_best=30)
LAWS = LawOptions(num_starts=6)
FEW = OptimumOptions(num_draws=1000, splits=2)
ACCEPTING = PriorOptions(accept_uncertain=True)
BEST = np.array([0.6, 0.3, 0.1])
TRUE = MixingLaws(
    constant=np.array([2.0, 1.5, 1.8]),
    scale=np.array([0.9, 1.4, 1.0]),
    exponents=np.array([[-3.0, 0.5, -0.5], [0.4, -4.0, -1.0], [0.3, 0.1, -5.0]]),
)


def bowls(mixtures):
    """Losses [n, 3] of ``mixtures``, each smallest at the mixture BEST."""
    return 2 + ((mixtures - BEST) ** 2).sum(axis=1, keepdims=True) * [1.0, 0.8, 1.2]


def runs_of(losses_of, count=80, domains=DOMAINS) -> MixtureRuns:
    """``count`` runs on random mixtures [n, 3], with the losses [n, 3] ``losses_of(mixtures)``."""
    mixtures = np.random.default_rng(0).dirichlet(np.ones(3), count)
    keys = [str(number) for number in range(count)]
    return MixtureRuns(keys, list(domains), mixtures, list(domains), losses_of(mixtures))


@pytest.fixture
def compute(corpus, tmp_path):
    """``compute(options_type, runs, **changes)``: a mixture fitted to ``runs``, or to a swarm."""

    def run(options_type, runs=None, **changes):
        output = tmp_path / "out" / "mixture.json"
        settings: dict[str, Any] = {"corpus": corpus.root, "output": output}
        if options_type is RegmixOptions:
            settings["trees"] = TREES
        elif options_type is MixingLawsOptions:
            settings["laws"] = LAWS
        else:
            settings["optimum"] = FEW
        if runs is not None:
            tables = {"ratios": tmp_path / "ratios.csv", "metrics": tmp_path / "metrics.csv"}
            write_mixture_runs(runs, **tables)
            settings |= tables
        elif not {"ratios", "swarm_dir"} & changes.keys():
            settings["swarm"] = SWARM
            settings["fallback"] = ACCEPTING
        options = options_type(**{**settings, **changes})
        (method,) = (each for each in find_methods().values() if each.options is options_type)
        assert not method.compute(options)
        return Mixture.load(options.output)

    return run


LAWS_OF_PRESETS = LawOptions(models=("nano", "regmix-1m", "tiny"), target_model="mini")
TABLES = {"ratios": Path("r"), "metrics": Path("m")}


@pytest.mark.parametrize(
    ("options_type", "changes", "identifier"),
    [
        (RegmixOptions, {"num_proxies": 3}, "3 runs"),
        (MixingLawsOptions, {"num_proxies": 3}, "3 runs"),
        (RegmixOptions, {"sampling": MixtureSamplingOptions(max_upweighting=0.1)}, "--num-proxies"),
        (RegmixOptions, {"ratios": Path("table.csv")}, "--metrics"),
        (RegmixOptions, {"swarm_dir": Path("s"), **TABLES}, "--ratios"),
        (RegmixOptions, {"swarm_dir": Path("s"), "num_proxies": 9}, "--swarm-dir"),
        (RegmixOptions, {"output": Path("/dev/null/mixture.json")}, "/dev/null"),
        (RegmixOptions, {"swarm": SWARM, **TABLES}, "--model nano"),
        (MixingLawsOptions, {"laws": LawOptions(target_steps=4)}, "--target-steps 4"),
        (MixingLawsOptions, {"laws": LAWS_OF_PRESETS, **TABLES}, "--target-model"),
        (SurrogateOptions, {"optimum": OptimumOptions(min_weight="0.4")}, "--min-weight"),
        (SurrogateOptions, {"optimum": OptimumOptions(max_weight="songs=0.3")}, "'songs'"),
        (MixingLawsOptions, {"laws": LawOptions(target_steps=9), "swarm": CUT}, "--target-tokens"),
    ],
)
def test_mistakes_are_reported_before_training(
    compute, tmp_path, options_type, changes, identifier
):
    with pytest.raises(UserError, match=identifier):
        compute(options_type, **changes)
    assert not list(tmp_path.glob("**/swarm.json"))


@pytest.mark.parametrize("sizes", [("nano", "tiny", "nano"), ("nano", "tiny", "regmix-1m", "twin")])
def test_a_power_law_over_sizes_needs_three_all_different(monkeypatch, sizes):
    monkeypatch.setitem(PRESETS, "twin", PRESETS["nano"])
    with pytest.raises(UserError, match="--models"):
        LawOptions(models=sizes, target_model="mini")


def test_columns_are_matched_to_domains_and_reported(compute, tmp_path):
    runs = runs_of(bowls)
    rows = [f"x{n},{c},{a},{p}\n" for n, (a, c, p) in enumerate(runs.mixtures)]
    (tmp_path / "r.csv").write_text("run,Code,train_news,poems\n" + "".join(rows))
    rows = [f"x{n},{a},0.1\n" for n, (a, _c, _p) in enumerate(runs.losses)]
    (tmp_path / "m.csv").write_text("run,metric/news_val_loss,arc_bpb\n" + "".join(rows))
    tables = {"ratios": tmp_path / "r.csv", "metrics": tmp_path / "m.csv"}
    with pytest.warns(MixtureWarning, match="scales, arc_bpb and news"):
        mixture = compute(RegmixOptions, **tables)
    assert mixture.parameters["renamed_columns"] == {
        "ratios": {"Code": "code", "train_news": "news"},
        "metrics": {"metric/news_val_loss": "news"},
    }
    assert set(mixture.parameters["fit"]["mae"]) == {"news", "arc_bpb"}
    # A constant loss has no rank correlation, but the file must not contain NaN, which is not JSON.
    text = (tmp_path / "out" / "mixture.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the file"))
    assert mixture.parameters["fit"]["spearman"]["arc_bpb"] is None
    (tmp_path / "m.csv").write_text("run,train/news,arc_bpb\n" + "".join(rows))
    with pytest.raises(UserError, match="is a training loss"):
        compute(RegmixOptions, **tables)
    with pytest.raises(UserError, match="songs"):
        compute(RegmixOptions, runs_of(bowls, domains=("news", "code", "songs")))


def test_diverged_members_are_left_out_of_the_fit(tmp_path):
    mixtures = np.random.default_rng(0).dirichlet(np.ones(3), 20)
    mixtures[:, 2] *= np.isin(np.arange(20), [2, 7])
    losses = 2 + mixtures[:, None]
    losses[[2, 7]] = np.nan
    losses[:, :, 1] = np.nan  # as for a domain without held-out text
    cost = Cost(1e9, 2.0, 1.0, 2)
    result = SwarmResult(tmp_path, list(DOMAINS), mixtures, [5], losses, [2, 7], cost)
    with pytest.warns(MixtureWarning) as caught:
        runs = swarm_runs([result], losses[:, -1])
    messages = [str(warning.message) for warning in caught]
    assert any("2 of 20 proxies" in message for message in messages)
    assert any("poems" in message for message in messages)
    assert runs.table.keys == [str(n) for n in range(20) if n not in (2, 7)]
    np.testing.assert_array_equal(runs.table.mixtures, np.delete(mixtures, [2, 7], 0))
    assert runs.table.metrics == ["news", "poems"]
    assert (runs.parameters["diverged"], runs.cost) == ([2, 7], cost)
    none = dataclasses.replace(result, diverged=list(range(20)))
    with pytest.raises(UserError, match="--lr"):
        swarm_runs([none], losses[:, -1])


def test_runs_worse_than_token_frequencies_are_reported(corpus):
    """The expected loss of frequencies is that of the empirical distribution, smoothed."""
    expected, tokenizer = [], corpus.tokenizer
    for name in corpus.names:
        train = np.asarray(open_domains(corpus).open(name, "train").tokens[:])
        valid = np.asarray(open_domains(corpus).open(name, "valid").tokens[:])
        counts = np.array([(train == token).sum() + 1 for token in range(tokenizer.vocab_size)])
        expected.append(-np.log(counts / counts.sum())[valid].mean())
    runs, equal = runs_of(bowls, domains=corpus.names), np.tile(expected, (80, 1))
    shares = np.full(3, 1 / 3)
    better, worse = (dataclasses.replace(runs, losses=equal + less) for less in (-0.001, 0.001))
    with pytest.warns(MixtureWarning, match="hardly trained"):
        warn_untrained(shares, corpus, worse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_untrained(shares, corpus, better)


@pytest.mark.parametrize("options_type", [RegmixOptions, SurrogateOptions])
def test_a_held_out_domain_is_a_metric_for_the_target_alone(compute, held_out_corpus, options_type):
    """The losses of the domains are lowest for much code, and that of poems for much news."""
    mixtures = np.random.default_rng(0).dirichlet(np.ones(2), 30)
    losses = 2 + ((mixtures[:, [1]] - [0.7, 0.6, 0.2]) ** 2)
    names = ["news", "code", "poems"]
    keys = [str(number) for number in range(30)]
    runs = MixtureRuns(keys, names[:2], mixtures, names, losses)
    settings = {"corpus": held_out_corpus.root, "fallback": ACCEPTING}
    fit = functools.partial(compute, options_type, **settings)
    mixture, target = fit(runs), fit(runs, target="poems")
    assert mixture.parameters["target_shares"] == {"news": 0.5, "code": 0.5, "poems": 0}
    assert target.parameters["target_shares"] == {"news": 0, "code": 0, "poems": 1}
    assert mixture.weights["code"] > 0.5 > target.weights["code"]
    assert set(mixture.parameters["predicted_losses"]) == set(names)
    two = dataclasses.replace(runs, metrics=names[:2], losses=losses[:, :2])
    assert fit(two).weights == pytest.approx(mixture.weights, abs=0.02)
    alone = dataclasses.replace(runs, metrics=names[2:], losses=losses[:, 2:])
    with pytest.raises(UserError, match="--target poems"):
        fit(alone)


def test_a_swarm_is_trained_fitted_and_costed(compute, held_out_corpus, tmp_path, capsys):
    """The members' losses of a held-out domain are a target of their own."""
    corpus = {"corpus": held_out_corpus.root}
    settings = {"num_proxies": 6, "sampling": SAMPLING, "swarm": CUT, **corpus}
    mixture = compute(RegmixOptions, **settings)
    assert "is cut to 25.6% of" in capsys.readouterr().out
    assert mixture.parameters["target_tokens"] == 2000
    folder = tmp_path / "out" / "mixture" / "swarm"
    record = SwarmRecord.load(folder)
    assert mixture.cost.flops == 0
    assert mixture.parameters["total_cost"]["flops"] == record.cost.flops > 1e8
    assert mixture.parameters["made_from"] == ["mixture/swarm"]
    tokens = SWARM.train_iters * SWARM.global_batch_size * SWARM.seq_length
    paper_flops = 6 * (12 * 4 * 64**2) * tokens * 6  # 6 N D for each of the six proxies
    assert mixture.parameters["paper_flops"] == pytest.approx(paper_flops)

    by_poems = compute(RegmixOptions, target="poems", **settings)
    assert "swarm: training 0 of 6 members" in capsys.readouterr().out
    for found, shares in ((mixture, (0.5, 0.5, 0)), (by_poems, (0, 0, 1))):
        assert [*found.weights] == ["news", "code"]
        assert tuple(found.parameters["target_shares"].values()) == shares
    assert (record.domains, record.held_out) == (["news", "code"], ["poems"])
    table = pd.read_csv(folder / "metrics.csv")
    assert [*table] == ["index", "valid_news", "valid_code", "valid_poems"]
    run = member_path(folder, 3).with_suffix("")
    measured = [line for line in read_metrics(run / METRICS_NAME) if "validation_loss" in line]
    assert [*table.iloc[3][1:]] == [*measured[-1]["validation_loss"].values()]
    before = (folder / "metrics.csv").read_bytes()
    collect_swarm(CollectOptions(swarm_dir=folder))
    assert (folder / "metrics.csv").read_bytes() == before

    files = {"output": tmp_path / "again.json", "fallback": ACCEPTING, **corpus}
    tables = {"ratios": folder / "ratios.csv", "metrics": folder / "metrics.csv"}
    fitted = compute(RegmixOptions, swarm_dir=folder, **files)
    same = compute(RegmixOptions, **files, **tables)
    assert fitted.weights == same.weights == pytest.approx(mixture.weights, abs=1e-9)
    for found in (fitted, same):
        assert found.parameters["total_cost"]["flops"] == record.cost.flops
    assert fitted.parameters["made_from"] == ["out/mixture/swarm"]
    dataclasses.replace(record, corpus_hash="0" * 64).save()
    with pytest.warns(MixtureWarning, match="trained on another corpus"):
        compute(RegmixOptions, swarm_dir=folder, **files)
    record.save()
    tables["metrics"].write_bytes(before[: before.rindex(b"\n5,") + 1])
    with pytest.raises(UserError, match="lacks 1 finished"):
        compute(RegmixOptions, swarm_dir=folder, **files)
    # Another trainer's losses in the same folder have no known cost.
    tables["metrics"].write_bytes(before.replace(b"\n3,", b"\n3,9"))
    assert "total_cost" not in compute(RegmixOptions, **files, **tables).parameters
    (folder / "metrics.csv").unlink()
    with pytest.raises(UserError, match="swarm collect --swarm-dir"):
        compute(RegmixOptions, swarm_dir=folder, **files)
    with pytest.raises(UserError, match=r"swarm\.json"):
        compute(RegmixOptions, swarm_dir=tmp_path, **files)


def test_fit_problems_concern_the_target_not_single_losses():
    """The loss of each of five domains falls with its weight, so the mean loss is only noise."""
    mixtures = sample_mixtures(np.full(5, 0.2), 64, 0)
    losses = 3 - 0.5 * mixtures + np.random.default_rng(0).normal(0, 0.03, (64, 5))
    trees, linear = (
        held_out_predictions(fit, mixtures, losses, folds_of(64, 5, 42))
        for fit in (lambda x, y: fit_trees(x, y, TreeSettings(num_trees=300)), fit_linear)
    )
    names = list("abcde")
    runs = MixtureRuns(list(map(str, range(64))), names, mixtures, names, losses)
    found = cross_validation(runs, np.full(5, 0.2), trees, linear)
    assert found.mae[:-1].mean() < 0.5 * found.mae_of_a_constant[:-1].mean()
    assert "constant" in fit_problems(found)[0]
    one = np.array([1.0, 0, 0, 0, 0])
    assert "linear" in fit_problems(cross_validation(runs, one, trees, linear))[0]
    assert fit_problems(cross_validation(runs, one, losses, losses + 1)) == []


def test_regmix_finds_the_best_mixture_for_the_target(compute):
    mixture = compute(RegmixOptions, runs_of(bowls))
    assert list(mixture.weights.values()) == pytest.approx(BEST, abs=0.08)
    fit = mixture.parameters["fit"]
    for name in DOMAINS:
        assert fit["spearman"][name] > fit["linear_spearman"][name] > 0
        assert fit["mae"][name] < fit["linear_mae"][name]
    centres = np.eye(3) * 0.6 + 0.1
    apart = runs_of(lambda mixtures: 2 + ((mixtures[:, None] - centres) ** 2).sum(axis=2))
    mixture = compute(RegmixOptions, apart, target="news=3,poems=1", fallback=ACCEPTING)
    assert mixture.parameters["target_shares"] == {"news": 0.75, "code": 0, "poems": 0.25}
    assert mixture.weights["news"] > mixture.weights["poems"] > mixture.weights["code"]


def with_one_loss(runs: MixtureRuns) -> MixtureRuns:
    return dataclasses.replace(runs, metrics=runs.metrics[:1], losses=runs.losses[:, :1])


def test_surrogate_finds_the_best_mixture_within_the_limits(compute, corpus, capsys):
    """The loss is the squared distance from BEST, so the best mixture is the nearest one."""
    limit = {"max_epochs": 2.0, "token_budget": 4 * corpus.train_tokens["news"]}
    floor = dataclasses.replace(FEW, min_weight="poems=0.2")
    runs = with_one_loss(runs_of(bowls, 24))
    with pytest.warns(MixtureWarning, match="--max-epochs"):
        mixture = compute(SurrogateOptions, runs, optimum=floor, **limit)
    best = [0.5, 0.3, 0.2]
    assert list(mixture.weights.values()) == pytest.approx(best, abs=0.01)
    assert mixture.weights["news"] <= 0.5
    assert mixture.weights["poems"] >= 0.2
    assert list(mixture.unconstrained.values()) == pytest.approx([0.55, 0.25, 0.2], abs=0.01)
    assert mixture.capped == ["news"]
    uniform, lowest = bowls(np.array([[1 / 3] * 3, best]))[:, 0]
    found = mixture.parameters["predicted_gain"]["uniform"]
    assert found["gain"] == pytest.approx(uniform - lowest, abs=0.03)
    assert 0 < found["low"] <= found["gain"] <= found["high"]
    assert mixture.parameters["written"] == "optimum"
    assert mixture.parameters["optimum"] == mixture.weights
    assert "predicted to beat Uniform with 90% confidence" in capsys.readouterr().out
    models = mixture.parameters["models"]
    shares = [each["share"]["news"] for each in models.values() if each["share"]]
    assert sum(shares) == pytest.approx(1)
    assert models["stack"]["mae"]["news"] < 0.05


def test_surrogate_stays_near_the_prior(compute, tmp_path):
    prior = {"news": 0.2, "code": 0.3, "poems": 0.5}
    path = tmp_path / "prior.json"
    Mixture(prior, method="manual").save(path)
    runs, fallback = runs_of(bowls, 24), PriorOptions(str(path))
    tasks = dataclasses.replace(runs, metrics=["arc", "hellaswag"], losses=runs.losses[:, :2])
    settings = {"optimum": dataclasses.replace(FEW, kl=1e6), "fallback": fallback}
    mixture = compute(SurrogateOptions, tasks, target="arc=2,hellaswag=1", **settings)
    assert mixture.parameters["target_shares"] == {"arc": 2 / 3, "hellaswag": 1 / 3}
    assert list(mixture.weights.values()) == pytest.approx(list(prior.values()), abs=1e-6)
    assert mixture.parameters["written"] == "prior"
    gains = mixture.parameters["predicted_gain"]
    assert gains["prior"]["gain"] == pytest.approx(0, abs=1e-4)
    assert gains["uniform"]["gain"] < 0


@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_noise_promises_no_gain_and_gives_the_prior_within_the_limits(
    compute, corpus, tmp_path, capsys
):
    """The limits leave less than all of the weight to the prior's domains; poems gets the rest."""
    rng = np.random.default_rng(1)
    noise = with_one_loss(runs_of(lambda rows: 2 + rng.normal(0, 0.1, (len(rows), 3)), 30))
    prior = tmp_path / "prior.json"
    Mixture({"news": 0.7, "code": 0.3, "poems": 0.0}, method="manual").save(prior)
    optimum = dataclasses.replace(FEW, max_weight="code=0.25", min_weight="poems=0.1")
    limits = {"max_epochs": 1.0, "token_budget": 2 * corpus.train_tokens["news"]}
    settings = {"fallback": PriorOptions(str(prior)), "optimum": optimum, **limits}
    mixture = compute(SurrogateOptions, noise, **settings)
    assert mixture.parameters["written"] == "prior"
    assert mixture.unconstrained is not None
    assert list(mixture.unconstrained.values()) == pytest.approx([0.65, 0.25, 0.1])
    assert list(mixture.weights.values()) == pytest.approx([0.5, 0.25, 0.25])
    for found in mixture.parameters["predicted_gain"].values():
        assert found["low"] <= 0 <= found["high"]
    assert "not predicted to beat" in capsys.readouterr().out.splitlines()[0]


ROUNDS = dataclasses.replace(SWARM, rounds=2)


def recorded(folder):
    return np.array(SwarmRecord.load(folder).mixtures)


@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_later_rounds_take_the_mixtures_that_the_surrogate_predicts_to_be_best(
    compute, corpus, tmp_path
):
    """The members' results exist already, so that nothing is trained: only the flow is tested."""
    options = RegmixOptions(
        corpus=corpus.root,
        output=tmp_path / "m.json",
        num_proxies=20,
        sampling=dataclasses.replace(SAMPLING, smallest_weight=0.01),
    )
    mixtures = mixtures_to_train(options, SearchSpace.of(corpus, None))
    losses, folder = bowls(mixtures), tmp_path / "out" / "mixture" / "swarm"
    (folder / "members").mkdir(parents=True)
    for member, row in enumerate(losses.tolist()):
        MemberRecord(member, [1, 2, 3, 4], [row] * 4).save(member_path(folder, member))
    settings = {"num_proxies": 20, "sampling": options.sampling, "swarm": ROUNDS, "target": "news"}
    settings["trees"] = dataclasses.replace(TREES, num_trees=10, folds=2)
    fewest = {**settings, "num_proxies": 14}
    with pytest.raises(UserError, match="--rounds 2 of --num-proxies 14"):
        compute(RegmixOptions, **fewest)
    compute(RegmixOptions, **settings)
    found = recorded(folder)
    np.testing.assert_array_equal(found[:10], mixtures[:10])
    assert len(np.unique(found, axis=0)) == 20
    assert np.abs(found[10:] - BEST).sum(axis=1).mean() < np.abs(mixtures - BEST).sum(axis=1).mean()
    # A resumed swarm keeps the recorded mixtures; without them, the same ones are chosen again.
    compute(RegmixOptions, **settings)
    np.testing.assert_array_equal(recorded(folder), found)
    (folder / SwarmRecord.FILE_NAME).unlink()
    for name in ("ratios.csv", "metrics.csv"):
        (folder / name).unlink()
    compute(RegmixOptions, **settings)
    np.testing.assert_array_equal(recorded(folder), found)
    with pytest.raises(UserError, match="--rounds 2, not 1"):
        compute(RegmixOptions, **{**settings, "swarm": SWARM})


@pytest.mark.parametrize("limits", ["epochs", "bounds", "prior"])
def test_rounds_choose_mixtures_that_may_be_the_result(corpus, tmp_path, monkeypatch, limits):
    """The loss falls with the weight of news, which the limits keep below its optimum of 1."""
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", 256)
    runs = runs_of(lambda mixtures: 3 - mixtures, 16)
    files = {"corpus": corpus.root, "output": tmp_path / "m.json"}
    settings: dict[str, Any] = {"num_proxies": 32, "swarm": ROUNDS, "target": "news", **files}
    method: FitMethod[Any]
    if limits == "epochs":
        budget = corpus.train_tokens["news"] * 4
        method = Regmix(RegmixOptions(**settings, token_budget=budget, max_epochs=1.6))
    elif limits == "bounds":
        optimum = OptimumOptions(max_weight="news=0.4", min_weight="poems=0.2")
        method = SurrogateFit(SurrogateOptions(**settings, optimum=optimum))
    else:
        settings |= {"fallback": PriorOptions("uniform"), "optimum": OptimumOptions(kl=1e3)}
        method = SurrogateFit(SurrogateOptions(**settings))
    chosen = method.with_next_round(runs.mixtures, runs)[16:]
    assert len(np.unique(chosen, axis=0)) == 16
    np.testing.assert_allclose(chosen.sum(axis=1), 1)
    if limits == "prior":
        assert np.abs(chosen - 1 / 3).max() < 0.15
        return
    assert chosen[:, 0].max() <= 0.4 + 1e-12
    assert chosen[:, 0].mean() > 0.38
    assert chosen[:, 2].min() >= (0.2 - 1e-12 if limits == "bounds" else 0)


def test_rounds_never_repeat_a_mixture(corpus, tmp_path, monkeypatch):
    """Only as many mixtures as proxies are possible, so the second round takes the other half."""
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", 0)
    files = {"corpus": corpus.root, "output": tmp_path / "m.json"}
    method = SurrogateFit(SurrogateOptions(num_proxies=64, swarm=ROUNDS, **files))
    mixtures = mixtures_to_train(method.options, method.space)
    runs = dataclasses.replace(with_one_loss(runs_of(bowls, 32)), mixtures=mixtures[:32])
    found = method.with_next_round(runs.mixtures, runs)
    np.testing.assert_allclose(np.unique(np.round(found, 9), axis=0), np.unique(mixtures, axis=0))


def test_mixing_laws_find_the_optimum_of_the_true_laws(compute):
    settings = {"target": "news=3,poems=1", "fallback": ACCEPTING}
    mixture = compute(MixingLawsOptions, runs_of(TRUE.predict, 10), **settings)
    shares = np.array(list(mixture.parameters["target_shares"].values()))
    grid = np.concatenate(list(simplex_grid(3, 200)))
    best = grid[(TRUE.predict(grid) @ shares).argmin()]
    assert list(mixture.weights.values()) == pytest.approx(best, abs=0.03)
    fit = mixture.parameters["fit"]
    assert fit["measured_by"] == "leave one out"
    assert all(fit["mae"][name] < min(0.02, fit["linear_mae"][name]) for name in DOMAINS)
    law = mixture.parameters["laws"]["code"]
    assert law["constant"] == pytest.approx(1.5, abs=0.1)


def test_extrapolation_gives_a_warning_and_can_be_limited(compute, monkeypatch):
    monkeypatch.setattr(f"{MixingLawsFit.__module__}.MAX_FOLDS", 3)
    existing = runs_of(TRUE.predict, 24)
    near = 0.2 + 0.4 * existing.mixtures
    middle = dataclasses.replace(existing, mixtures=near, losses=TRUE.predict(near))
    with pytest.warns(MixtureWarning, match="nearest run"):
        far = compute(MixingLawsOptions, middle, target="code", fallback=ACCEPTING)
    assert far.weights["code"] > near[:, 1].max() + 0.1
    assert far.parameters["reach"]["extrapolates"]
    assert "code" in far.parameters["reach"]["outside_range"]
    laws = dataclasses.replace(LAWS, max_extrapolation=0.0)
    limited = compute(MixingLawsOptions, middle, target="code", laws=laws, fallback=ACCEPTING)
    weights = np.array(list(limited.weights.values()))
    assert (near.min(axis=0) - 1e-9 <= weights).all()
    assert (weights <= near.max(axis=0) + 1e-9).all()


def test_laws_do_not_extrapolate_from_less_than_1_percent(compute, monkeypatch):
    """The best mixture is uniform, but the exponents of the rare domain are fitted to noise."""
    monkeypatch.setattr(f"{MixingLawsFit.__module__}.MAX_FOLDS", 3)
    rng = np.random.default_rng(0)
    common, rare = rng.dirichlet(np.ones(2), 24), rng.uniform(0, 0.01, (24, 1))
    mixtures = np.column_stack([common * (1 - rare), rare])
    losses = 2 + np.exp(-2 * mixtures) + rng.normal(0, 0.02, mixtures.shape)
    runs = dataclasses.replace(runs_of(bowls, 24), mixtures=mixtures, losses=losses)
    with pytest.warns(MixtureWarning, match="for poems, .*--max-extrapolation"):
        mixture = compute(MixingLawsOptions, runs, fallback=ACCEPTING)
    assert mixture.weights["poems"] <= rare.max() + 1e-9
    far = dataclasses.replace(LAWS, max_extrapolation=1.0)
    free = compute(MixingLawsOptions, runs, laws=far, fallback=ACCEPTING)
    assert free.weights["poems"] > 0.2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_swarms_of_every_size_are_trained_in_rounds_costed_and_resumed(compute, tmp_path):
    sizes = LAWS_OF_PRESETS.models
    laws = dataclasses.replace(LAWS_OF_PRESETS, target_steps=20, fit_steps_from=2)
    settings = {"num_proxies": 16, "sampling": SAMPLING, "laws": laws, "swarm": ROUNDS}
    whole = compute(MixingLawsOptions, **settings)
    folders = [tmp_path / "out" / "mixture" / f"swarm-{size}" for size in sizes]
    assert set(whole.parameters) >= {*(f"step_law_{size}" for size in sizes), "size_law"}
    assert whole.parameters["made_from"] == [f"mixture/swarm-{size}" for size in sizes]
    costs = [SwarmRecord.load(folder).cost.flops for folder in folders]
    assert whole.parameters["total_cost"]["flops"] == pytest.approx(sum(costs))
    # The paper counts 6 N D FLOPs, with N = 12 L h^2, but with N = 1,000,000 for the 1M proxy.
    tokens = SWARM.train_iters * SWARM.global_batch_size * SWARM.seq_length
    counted = [12 * 4 * 64**2, 1_000_000, 12 * 4 * 128**2]
    assert whole.parameters["paper_flops"] == pytest.approx(6 * sum(counted) * tokens * 16)
    mixtures = [recorded(folder) for folder in folders]
    assert (mixtures[0] == mixtures).all()
    assert len(mixtures[0]) == 16
    # An interrupted round resumes with the same mixtures.
    shutil.rmtree(folders[2])
    member_path(folders[1], 12).unlink()
    shutil.rmtree(member_path(folders[1], 12).with_suffix(""))
    assert compute(MixingLawsOptions, **settings).weights == whole.weights
    np.testing.assert_array_equal([recorded(folder) for folder in folders], mixtures)


def known_losses(mixtures, steps, name):
    """Losses [n, steps, k] by a known law over steps, mixtures and model sizes."""
    over_steps = (300 / np.array(steps, float)[:, None]) ** 0.6
    return TRUE.predict(mixtures)[:, None] + (2e5 / layer_parameters(name)) ** 0.3 + over_steps


def test_losses_are_extrapolated_to_the_target_steps_and_size(corpus, tmp_path):
    mixtures = np.random.default_rng(0).dirichlet(np.ones(3), 8)
    steps, swarms = [2000, 4000, 6000, 8000, 10000], {}
    for name in ("nano", "tiny", "mini"):
        losses = known_losses(mixtures, steps, name)
        diverged = [3] if name == "tiny" else []
        losses[diverged] = np.nan
        swarms[name] = SwarmResult(
            tmp_path, list(DOMAINS), mixtures, steps, losses, diverged, Cost()
        )

    def run(found, **changes):
        swarm = dataclasses.replace(SWARM, train_iters=10000, eval_interval=2000)
        laws = LawOptions(target_steps=30000, **changes)
        files = {"corpus": corpus.root, "output": tmp_path / "m.json"}
        options = MixingLawsOptions(swarm=swarm, laws=laws, **files)
        losses, _, parameters = MixingLawsFit(options).losses_to_fit(found)
        return losses, parameters

    losses, parameters = run(swarms, models=tuple(swarms), target_model="60m")
    expected = known_losses(mixtures, [30000], "60m")[:, 0]
    expected[3] = np.nan
    np.testing.assert_allclose(losses, expected, atol=5e-3)
    assert parameters["step_law_nano"]["exponent"] == pytest.approx(0.6, abs=0.01)
    assert parameters["step_law_nano"]["backtest_mae"] < 1e-3
    assert parameters["size_law"]["exponent"] == pytest.approx(0.3, abs=0.01)
    _, parameters = run({"nano": swarms["nano"]}, fit_steps_from=6000)
    assert parameters["step_law_nano"]["backtest_mae"] is None
