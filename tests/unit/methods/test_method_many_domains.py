"""Hundreds of domains: what is kept, what is printed, and what the intervals are drawn from."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.artifacts.mixture import MAX_AFFINITY_DOMAINS
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.common.table import (
    HEAVIEST,
    LIGHTEST,
    MOST_ROWS,
    listed,
    mixture_table,
    share_of_tokens,
)
from megatron_chameleon.methods.leverage.domain_windows import read_windows
from megatron_chameleon.methods.leverage.explain import explanation
from megatron_chameleon.methods.leverage.weighing import weigh
from megatron_chameleon.mixture import chameleon_weights, grouping
from megatron_chameleon.options.mixture import RecipeOptions
from tests.unit.methods.many_domains import made_plan, made_store

WIDTH, WINDOWS = 12, 64


@pytest.fixture
def weighed(finished_run, tmp_path):
    """``weighed(k, **changes)``: the mixture of k made-up domains, and their windows."""

    def make(count, **changes):
        names = [f"domain-{number:04}" for number in range(count)]
        store = made_store(tmp_path / f"store-{count}", names, WINDOWS, WIDTH)
        weighting = RecipeOptions("scaled", bootstrap_resamples=20)
        options = ChameleonOptions(
            corpus=finished_run,
            checkpoint=finished_run,
            output=tmp_path / "m.json",
            weighting=weighting,
            **changes,
        )
        windows = read_windows(store, names, seed=0)
        plan = made_plan(options, names, finished_run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of scores at their limits; told elsewhere
            return weigh(plan, windows, None), windows, plan

    return make


def test_the_affinity_is_kept_up_to_a_number_of_domains(weighed, tmp_path):
    few, _, _ = weighed(MAX_AFFINITY_DOMAINS)
    assert np.shape(few.affinity) == (MAX_AFFINITY_DOMAINS, MAX_AFFINITY_DOMAINS)
    many, windows, _ = weighed(MAX_AFFINITY_DOMAINS + 1)
    assert many.affinity is None
    many.save(tmp_path / "many.json")
    assert (tmp_path / "many.json").stat().st_size < 500 * len(windows.counts)
    assert json.loads((tmp_path / "many.json").read_text())["affinity"] is None
    expected = chameleon_weights(windows.means, "pretrain", "scaled").weights
    assert list(many.weights.values()) == pytest.approx(expected)


def test_the_table_of_many_domains_shows_the_heaviest_and_the_lightest(weighed):
    few, _, _ = weighed(MOST_ROWS)
    assert len(mixture_table(few).splitlines()) == 1 + MOST_ROWS
    assert "between" not in mixture_table(few)
    mixture, _, _ = weighed(300)
    ranked = sorted(mixture.weights, key=lambda name: -mixture.weights[name])
    lines = mixture_table(mixture).splitlines()
    shown = [line.split()[0] for line in lines[1:]]
    assert shown == [*ranked[:HEAVIEST], "...", *ranked[-LIGHTEST:]]
    assert lines[1 + HEAVIEST] == "... 265 domains between; the file has all of them"


@pytest.mark.parametrize(
    ("weight", "shown"), [(0.25, "0.2500"), (0.001, "0.0010"), (0.00098, "9.8e-04"), (0, "0.0000")]
)
def test_small_weights_keep_their_digits(weight, shown):
    assert share_of_tokens(weight) == shown


def test_long_lists_of_names_are_cut():
    assert listed(["a", "b"]) == "a, b"
    names = [str(number) for number in range(1200)]
    assert listed(names) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 1,190 more"


def test_windows_are_grouped_where_they_are_too_many(weighed, monkeypatch):
    whole, windows, _ = weighed(20)
    assert whole.parameters["bootstrap_group"] == windows.group == 1
    monkeypatch.setattr(grouping, "MAX_VALUES", 20 * 32 * WIDTH)
    grouped, windows, _ = weighed(20)
    assert grouped.parameters["bootstrap_group"] == 2
    assert [len(rows) for rows in windows.resampled] == [32] * 20
    assert grouped.weights == whole.weights
    assert set(grouped.parameters["windows"].values()) == {WINDOWS}  # of the domain, not groups

    def widths(mixture: Mixture) -> np.ndarray:
        assert mixture.intervals
        return np.array([high - low for low, high in mixture.intervals.values()])

    assert np.median(widths(grouped) / widths(whole)) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("target", [None, "domain-0007"])
def test_the_explanation_of_many_domains_fits_the_page(weighed, target):
    mixture, windows, plan = weighed(120, target=target)
    prior = None if plan.target is None else plan.target.prior(plan.names, None)
    text = explanation(plan.names, windows, "pretrain", plan.recipe, prior)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("... and 100 domains of less weight") == 2
    heaviest = max(mixture.weights, key=mixture.weights.__getitem__)
    assert f"{heaviest}" in text
    pairs = [line for line in text.splitlines() if " and " in line and line[0].isdigit()]
    assert len(pairs) == 10
