"""--method regmix: from a swarm or from a person's tables to mixture.json."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings

import numpy as np
import pytest

from megatron_chameleon.artifacts import Cost, Mixture, MixtureWarning
from megatron_chameleon.artifacts.mixture_runs import MixtureRunsWarning
from megatron_chameleon.artifacts.swarm import SwarmRecord
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.fits.regmix import (
    check_lightgbm,
    check_number_of_runs,
    compute_regmix,
)
from megatron_chameleon.methods.fits.runs import drawn_mixtures, trained_runs
from megatron_chameleon.methods.regmix import METHOD, RegmixOptions, TreeOptions
from megatron_chameleon.methods.swarm.result import SwarmResult
from megatron_chameleon.options.fits import DrawOptions
from megatron_chameleon.options.stopping import StoppingOptions
from tests.small_corpus import DOMAINS, write_small_corpus
from tests.unit.methods.fit_runs import SWARM, drawn_runs, make_options

QUICK = TreeOptions(num_trees=100, tree_learning_rate=0.1, num_draws=3000, num_best=30)
BEST = np.array([0.6, 0.3, 0.1])


def runs(count=80, domains=DOMAINS):
    """Runs of which those nearest to BEST have the smallest losses."""

    def losses_of(mixtures):
        return 2 + ((mixtures - BEST) ** 2).sum(axis=1, keepdims=True) * [1.0, 0.8, 1.2]

    return drawn_runs(losses_of, count, domains)


@pytest.fixture
def options(corpus, tmp_path):
    """``options(runs, **changes)``: to fit ``runs``, or to train without any."""

    def make(given=None, **changes):
        return make_options(RegmixOptions, corpus, tmp_path, given, {"trees": QUICK, **changes})

    return make


@pytest.fixture
def compute(options):
    def run(*given, **changes):
        asked = options(*given, **changes)
        compute_regmix(asked)
        return Mixture.load(asked.output)

    return run


def test_the_best_mixture_of_a_persons_runs_is_found(compute, capsys):
    mixture = compute(runs())
    assert mixture.method == "regmix"
    assert list(mixture.weights.values()) == pytest.approx(BEST, abs=0.08)
    assert sum(mixture.weights.values()) == pytest.approx(1)
    said = capsys.readouterr().out
    assert "fitted to 80 runs of" in said
    assert "cost of the fit alone (unknown: the runs of" in said
    assert "next: tools/pretrain_gpt.py --corpus" in said
    assert mixture.cost.flops == 0
    assert mixture.cost.wall_seconds > 0


def test_the_fit_is_judged_beside_a_linear_one(compute):
    fit = compute(runs()).parameters["fit"]
    assert fit["measured_by"] == "5-fold cross-validation"
    for name in DOMAINS:
        assert fit["spearman"][name] > fit["linear_spearman"][name] > 0
        assert fit["mae"][name] < fit["linear_mae"][name]


def test_a_fit_to_noise_says_so(compute, capsys):
    given = runs()
    noise = np.random.default_rng(1).normal(3, 0.1, given.losses.shape)
    mixture = compute(dataclasses.replace(given, losses=noise))
    assert abs(mixture.parameters["fit"]["spearman"]["news"]) < 0.35
    assert (
        "the target no better than a constant, so the mixture says nothing"
        in capsys.readouterr().out
    )


def test_the_target_chooses_what_is_small(compute):
    given = runs()
    centres = np.eye(3) * 0.6 + 0.1
    losses = 2 + ((given.mixtures[:, None] - centres) ** 2).sum(axis=2)
    for name in DOMAINS:
        mixture = compute(dataclasses.replace(given, losses=losses), target=name)
        assert max(mixture.weights, key=mixture.weights.__getitem__) == name
        assert mixture.parameters["target_shares"] == {n: float(n == name) for n in DOMAINS}
    mixture = compute(dataclasses.replace(given, losses=losses), target="news=3,poems=1")
    assert mixture.parameters["target_shares"] == {"news": 0.75, "code": 0, "poems": 0.25}
    assert mixture.weights["news"] > mixture.weights["poems"] > mixture.weights["code"]


def test_decorated_names_in_another_order_are_the_corpus_s(options, tmp_path, compute):
    given = runs()
    (tmp_path / "r.csv").write_text(
        "run,train_my_poems,train_my_news,train_my_code\n"
        + "".join(f"x{n},{p},{a},{c}\n" for n, (a, c, p) in enumerate(given.mixtures))
    )
    (tmp_path / "m.csv").write_text(
        "run,metric/my_poems_val_loss,metric/my_news_val_loss\n"
        + "".join(f"x{n},3,{loss}\n" for n, loss in enumerate(given.losses[:, 0]))
    )
    tables = {"ratios": tmp_path / "r.csv", "metrics": tmp_path / "m.csv"}
    mixture = compute(target="news", **tables)
    assert list(mixture.weights) == list(DOMAINS)
    assert list(mixture.weights.values()) == pytest.approx(BEST, abs=0.08)
    assert set(mixture.parameters["fit"]["mae"]) == {"poems", "news"}


def test_a_domain_that_no_run_had_gets_no_weight_and_a_word(compute):
    given = runs()
    pairs = given.mixtures[:, :2] / given.mixtures[:, :2].sum(axis=1, keepdims=True)
    two = dataclasses.replace(given, domains=["news", "code"], mixtures=pairs)
    with pytest.warns(MixtureWarning, match="no run has text of poems"):
        mixture = compute(two)
    assert mixture.weights["poems"] == 0


def test_a_domain_that_the_corpus_lacks_is_refused(compute):
    with pytest.raises(UserError, match=r"'songs' is no domain of .*; rename the column"):
        compute(runs(domains=("news", "code", "songs")))


def test_an_optimum_far_from_what_was_trained_is_called_out(compute):
    given = runs()
    near = 0.2 + 0.4 * given.mixtures
    losses = 3 - near[:, [0]] * [1.0, 1.0, 1.0]
    with pytest.warns(MixtureWarning, match=r"far from what was trained: \d+% of the tokens"):
        mixture = compute(dataclasses.replace(given, mixtures=near, losses=losses))
    reach = mixture.parameters["reach"]
    assert reach["extrapolates"]
    assert "news" in reach["outside_range"]


def test_the_limit_of_epochs_holds_and_predictions_are_of_what_it_leaves(compute, corpus):
    budget = 2 * sum(corpus.train_tokens.values())
    free = compute(runs(), token_budget=budget)
    with pytest.warns(MixtureWarning, match="holds news down"):
        held = compute(runs(), token_budget=budget, max_epochs=3.0)
    assert max(free.epochs.values()) > 3 >= max(held.epochs.values()) - 1e-9
    assert held.unconstrained == pytest.approx(free.weights)
    assert held.parameters["predicted_losses"] != free.parameters["predicted_losses"]


def test_a_swarm_is_trained_fitted_and_paid_for(compute, options, corpus, tmp_path, capsys):
    draws = DrawOptions(smallest_weight=0.05)
    mixture = compute(num_proxies=10, draws=draws)
    swarm = tmp_path / "out" / "mixture" / "swarm"
    assert {path.name for path in swarm.glob("*.csv")} == {"ratios.csv", "metrics.csv"}
    assert mixture.parameters["runs"] == 10
    assert mixture.cost.flops == 0
    assert mixture.parameters["total_cost"]["flops"] == SwarmRecord.load(swarm).cost.flops > 1e8
    assert mixture.parameters["made_from"] == ["mixture/swarm"]
    tokens = SWARM.train_iters * SWARM.global_batch_size * SWARM.seq_length
    by_paper = 6 * (12 * 4 * 64**2) * tokens * 10  # 6 N D of ten nano proxies
    assert mixture.parameters["paper_flops"] == pytest.approx(by_paper)
    assert "10 of 10 members" in capsys.readouterr().out

    again = compute(num_proxies=10, draws=draws)
    assert "all 10 members are there" in capsys.readouterr().out
    assert again.weights == mixture.weights
    assert again.parameters["total_cost"]["flops"] == mixture.parameters["total_cost"]["flops"]

    first = SwarmRecord.load(swarm)
    times = {path.name: path.stat().st_mtime_ns for path in (swarm / "members").iterdir()}
    more = compute(num_proxies=12, draws=draws)
    assert "2 of 12 members" in capsys.readouterr().out
    assert more.parameters["runs"] == 12
    assert SwarmRecord.load(swarm).mixtures[:10] == first.mixtures
    for name, written in times.items():
        assert (swarm / "members" / name).stat().st_mtime_ns == written

    tables = {"ratios": swarm / "ratios.csv", "metrics": swarm / "metrics.csv"}
    fitted = compute(output=tmp_path / "again.json", **tables)
    assert fitted.weights == pytest.approx(more.weights, abs=1e-9)
    assert fitted.parameters["unknown_costs"] == [f"the runs of {swarm / 'ratios.csv'}"]
    assert not {"total_cost", "paper_flops"} & set(fitted.parameters)


def swarm_result(diverged=()):
    mixtures = np.random.default_rng(0).dirichlet(np.ones(3), 20)
    losses = np.repeat(2 + mixtures[:, None], 2, axis=1)
    losses[list(diverged)] = np.nan
    return SwarmResult(
        list(DOMAINS), mixtures, [5, 10], losses, list(diverged), Cost(1e9, 2.0, 1.0, 2)
    )


def test_members_that_diverged_are_left_out_with_a_word(tmp_path):
    result = swarm_result(diverged=[2, 7])
    with pytest.warns(MixtureWarning, match="2 of 20 proxies diverged and are left out .*: 2, 7"):
        fitted = trained_runs(result, result.losses[:, -1], [tmp_path])
    assert fitted.runs.keys == [str(n) for n in range(20) if n not in (2, 7)]
    np.testing.assert_array_equal(fitted.runs.mixtures, np.delete(result.mixtures, [2, 7], 0))
    assert np.isfinite(fitted.runs.losses).all()
    assert fitted.parameters["diverged"] == [2, 7]
    assert fitted.cost == result.cost


def test_a_swarm_that_diverged_as_a_whole_is_refused(tmp_path):
    result = swarm_result(diverged=range(20))
    with pytest.raises(UserError, match="all 20 proxies diverged; give a smaller --lr"):
        trained_runs(result, result.losses[:, -1], [tmp_path])


def test_a_domain_whose_proxies_all_diverged_is_told_by_its_name(tmp_path):
    result = swarm_result(diverged=[2, 7])
    result.mixtures[:] = [[0.5, 0.5, 0.0]]
    result.mixtures[[2, 7]] = [0.0, 0.0, 1.0]
    with pytest.warns(MixtureWarning) as caught:
        trained_runs(result, result.losses[:, -1], [tmp_path])
    told = [str(warning.message) for warning in caught]
    assert any(f"18 proxies of {tmp_path}: no run has text of poems" in line for line in told)


def test_domains_that_hardly_any_mixture_has_are_told_before_training(tmp_path, monkeypatch):
    rare = write_small_corpus(tmp_path / "corpus")
    tokens = {"news": 100_000, "code": 60_000, "poems": 1}
    monkeypatch.setattr(type(rare), "train_tokens", property(lambda _: tokens))
    with pytest.warns(MixtureWarning) as caught:
        drawn_mixtures(DrawOptions(), 32, rare)
    (told,) = (str(warning.message) for warning in caught)
    assert told == (
        "the mixtures that are drawn for 32 proxies: no run has text of poems: nothing is known of "
        "them, and they get weight 0; give a smaller --smallest-weight, a larger --max-upweighting "
        "or more --num-proxies"
    )
    tokens["poems"] = 20
    with pytest.warns(MixtureWarning, match="fewer than 5 runs have text of poems: little is know"):
        drawn_mixtures(DrawOptions(), 32, rare)
    tokens["poems"] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn_mixtures(DrawOptions(), 32, rare)


def test_a_domain_without_held_out_text_is_no_metric(tmp_path):
    result = swarm_result()
    result.losses[:, :, 1] = np.nan
    fitted = trained_runs(result, result.losses[:, -1], [tmp_path])
    assert fitted.runs.metrics == ["news", "poems"]
    assert fitted.runs.losses.shape == (20, 2)


def test_the_same_seed_draws_the_same_mixtures(corpus):
    draws = DrawOptions(smallest_weight=0.02)
    one, other = (drawn_mixtures(draws, 6, corpus) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    third = drawn_mixtures(dataclasses.replace(draws, mixture_seed=1), 6, corpus)
    assert not np.array_equal(one, third)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_proxies": 0}, "--num-proxies 0: "),
        ({"num_proxies": 4}, "4 runs are too few for trees"),
        ({"trees": dataclasses.replace(QUICK, num_best=9999)}, "--num-best 9999 of --num-draws"),
        ({"trees": dataclasses.replace(QUICK, folds=1)}, "--folds 1: "),
        ({"trees": dataclasses.replace(QUICK, num_trees=0)}, "--num-trees 0"),
        ({"trees": dataclasses.replace(QUICK, tree_learning_rate=2.0)}, "--tree-learning-rate 2"),
        ({"target": "songs"}, "--target songs: no loss is called 'songs'; there are news, code"),
        ({"target": "news=0"}, "--target news=0: the share '0' of 'news' is not a finite number"),
        ({"target": "news,news"}, "'news' is there twice"),
        ({"target": ","}, "--target ,: it names nothing"),
        ({"draws": DrawOptions(max_upweighting=0.1)}, "--num-proxies 512 and the flags of their d"),
        ({"draws": DrawOptions(mixture_seed=-1)}, "--mixture-seed -1"),
        ({"draws": DrawOptions(smallest_weight=0.5)}, "fewer than the 512 wanted: ask for fewer"),
        ({"max_epochs": 2.0}, "--max-epochs limits the epochs of a --token-budget"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(options, changes, told, tmp_path):
    with pytest.raises(UserError, match=told):
        compute_regmix(options(**changes))
    assert not (tmp_path / "out").exists()


def test_one_table_alone_is_refused(options, tmp_path):
    for given, missing in (("ratios", "metrics"), ("metrics", "ratios")):
        with pytest.raises(UserError, match=f"--{given} is one of two tables: give --{missing}"):
            compute_regmix(options(**{given: tmp_path / "table.csv"}))


def test_too_few_runs_of_a_person_are_refused(compute):
    with pytest.raises(UserError, match="4 runs are too few for trees"):
        compute(runs(count=4))
    with pytest.raises(UserError, match=r"30 runs .* leaves of 20 need 40"):
        check_number_of_runs(dataclasses.replace(QUICK, min_runs_in_leaf=20), 30)
    check_number_of_runs(dataclasses.replace(QUICK, min_runs_in_leaf=20), 50)


def test_runs_with_gaps_are_fitted_without_them(options, tmp_path):
    asked = options(runs())
    table = asked.metrics.read_text().splitlines()
    table[5] = table[5].rpartition(",")[0] + ",nan"
    asked.metrics.write_text("\n".join(table) + "\n")
    with pytest.warns(MixtureRunsWarning, match="1 of 80 runs lack a metric"):
        compute_regmix(asked)
    assert Mixture.load(asked.output).parameters["runs"] == 79


@pytest.mark.parametrize("rank", ["0", "1"])
def test_other_ranks_leave_a_persons_runs_to_the_first(options, monkeypatch, rank):
    asked = options(runs())
    monkeypatch.setenv("RANK", rank)
    assert compute_regmix(asked)  # all of them have the same status
    assert asked.output.exists() == (rank == "0")


def test_a_swarm_that_was_asked_to_stop_leaves_no_mixture_and_says_so(options, capsys):
    at_once = dataclasses.replace(SWARM, stopping=StoppingOptions(exit_duration_in_mins=1e-9))
    asked = options(swarm=at_once, num_proxies=12)
    assert METHOD.compute(asked) == STOPPED_STATUS
    assert not asked.output.exists()
    assert "has stopped; the same command goes on with it" in capsys.readouterr().out


def test_what_is_written_is_plain_json(compute, options):
    given = runs()
    constant = dataclasses.replace(given, losses=given.losses * [1, 1, 0] + [0, 0, 3.0])
    mixture = compute(constant)
    assert mixture.parameters["fit"]["spearman"]["poems"] is None
    text = options(given).output.read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the file"))


def test_lightgbm_that_is_not_there_is_told_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(UserError, match=r"--method regmix needs LightGBM .*pip install lightgbm"):
        check_lightgbm()


def test_a_library_that_cannot_be_loaded_is_told_with_the_remedy(monkeypatch):
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == "lightgbm":
                raise OSError("libgomp.so.1: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "lightgbm", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(UserError, match=r"libgomp.so.1: .*apt-get install libgomp1"):
        check_lightgbm()
