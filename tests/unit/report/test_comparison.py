"""Evaluated runs compared: perplexity, loss, bits per byte, seeds, and errors."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest

from megatron_chameleon.artifacts import Clusters, DomainLoss, Mixture
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.comparison import (
    Comparison,
    Evaluated,
    caveats,
    compare,
    findings,
    loss_table,
    perplexity_table,
    seed_table,
)
from megatron_chameleon.report.run_folder import RunFolder, merge
from megatron_chameleon.report.tables import is_best
from tests.unit.report.samples import (
    CHAMELEON,
    NAMES,
    PROTOCOL,
    RUNS,
    UNIFORM,
    edit_evaluation,
    evaluation,
    random_mixture,
    random_weights,
    rows_of,
    write_training_run,
)


def test_averages_and_counts_are_over_domains(root):
    edit_evaluation(root, UNIFORM, domains=evaluation(NAMES, [1.0, 2.0, 3.0]).domains)
    edit_evaluation(root, CHAMELEON, domains=evaluation(NAMES, [0.9, 2.1, 3.0]).domains)
    folder = RunFolder.load(root)
    table = perplexity_table(folder, compare(folder))
    average, better = (list(row) for row in table.summary)
    uniform = (math.e + math.e**2 + math.e**3) / 3
    chameleon = (math.exp(0.9) + math.exp(2.1) + math.exp(3.0)) / 3
    unigram = (math.exp(6.0) + math.exp(6.1) + math.exp(6.2)) / 3
    assert average[-3:] == [f"{unigram:.2f}", f"{uniform:.2f}", f"{chameleon:.2f}"]
    assert better[0] == "domains better than Uniform"
    assert better[-2:] == ["-", "1 of 3"]  # equal is not better
    marks = [[is_best(cell) for cell in row[-2:]] for row in table.rows]
    assert marks == [[False, True], [True, False], [True, True]]
    assert [is_best(cell) for cell in table.summary[0][-2:]] == [True, False]
    change = 100 * (chameleon / uniform - 1)
    assert findings(compare(folder))[-1] == (
        f"Chameleon has an average perplexity of {chameleon:.2f}, Uniform of {uniform:.2f} "
        f"(+{change:.1f}%); Chameleon is lower in 1 of 3 domains."
    )


def test_intervals_of_a_recomputed_mixture_are_not_shown(root, rng):
    random_mixture(random_weights(NAMES, rng), "pretrain", rng.normal(size=(3, 4))).save(
        root / "4-mixture/chameleon-pretrain.json"
    )
    folder = RunFolder.load(root)
    comparison = compare(folder)
    header = perplexity_table(folder, comparison).header
    assert not any("interval" in heading for heading in header)
    (sentence,) = caveats(folder, comparison)
    assert "4-mixture/chameleon-pretrain.json has changed" in sentence


@pytest.mark.parametrize("name", ["chameleon-pretrain", "chameleon-pretrain-2k-seed1"])
def test_a_run_finds_the_mixture_it_is_named_after(root, rng, name):
    for stage, suffix in (("5-base", ""), ("6-evaluation", ".json")):
        (root / stage / f"{CHAMELEON}{suffix}").rename(root / stage / f"{name}{suffix}")
    own = root / "4-mixture/chameleon-pretrain.json"
    Mixture(Mixture.load(own).weights, "manual").save(root / "4-mixture/best.json")
    folder = RunFolder.load(root)
    assert any("interval" in h for h in perplexity_table(folder, compare(folder)).header)
    assert caveats(folder, compare(folder)) == []
    random_mixture(random_weights(NAMES, rng), "pretrain", rng.normal(size=(3, 4))).save(own)
    shutil.copytree(root, copy := root.with_name("copy"))
    change = json.loads((copy / "4-mixture/chameleon-pretrain.json").read_text())
    change["cost"]["device_seconds"] = 999.0
    change.pop("checksum", None)
    (copy / "4-mixture/chameleon-pretrain.json").write_text(json.dumps(change))
    merged = merge([RunFolder.load(root), RunFolder.load(copy)])
    for folder in (RunFolder.load(root), merged):
        (sentence,) = caveats(folder, compare(folder))
        assert "4-mixture/chameleon-pretrain.json has changed" in sentence


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus_hash": "other"}, "of another corpus"),
        ({"protocol": dataclasses.replace(PROTOCOL, window_length=32)}, "different protocols"),
        ({"domains": evaluation(["code", "prose"], [1.0, 1.0]).domains}, r"domain 'a\|b_<x>'"),
    ],
)
def test_evaluations_that_cannot_be_compared_are_rejected(root, changes, message):
    edit_evaluation(root, UNIFORM, **changes)
    with pytest.raises(UserError, match=message):
        compare(RunFolder.load(root))


TOKENS = [20, 30, 50]


def domain(losses):
    """A domain of three documents with these mean losses."""
    sums = [loss * tokens for loss, tokens in zip(losses, TOKENS, strict=True)]
    clusters = Clusters(sums, TOKENS)
    return DomainLoss(sum(sums) / sum(TOKENS), sum(TOKENS), 6.0, None, clusters)


@pytest.fixture
def losses():
    """For each run and domain, the loss of each document; the second run is surely lower in the
    first domain, surely higher in the second, and neither in the third."""
    hard = {name: np.array([2.0, 3.0, 4.0]) + i for i, name in enumerate(NAMES)}
    shifts = dict(zip(NAMES, ([-0.11, -0.1, -0.1], [0.1, 0.1, 0.12], [-0.5, 0.4, 0]), strict=True))
    return {RUNS[0]: hard, RUNS[1]: {name: hard[name] + shifts[name] for name in NAMES}}


def test_losses_and_paired_differences_have_their_errors(root, losses):
    for run in RUNS:
        domains = {name: domain(losses[run][name]) for name in NAMES}
        edit_evaluation(root, run, domains=domains)
    table = loss_table(compare(RunFolder.load(root)))
    columns = ("loss Uniform", "loss Chameleon", "Chameleon minus Uniform")
    assert table.header == ("domain", "tokens", *columns)
    weights = np.array(TOKENS) / sum(TOKENS)
    for name in NAMES:
        tokens, *cells = rows_of(table)[name]
        assert tokens == "100"
        first, second = (losses[run][name] for run in RUNS)
        for cell, values in zip(cells, (first, second, second - first), strict=True):
            mean = weights @ values
            error = math.sqrt(3 / 2 * ((weights * (values - mean)) ** 2).sum())
            assert tuple(map(float, cell.split(" ± "))) == pytest.approx((mean, error), abs=6e-5)


EVEN = dict.fromkeys(NAMES, 1 / 3)
SKEWED = dict(zip(NAMES, (0.5, 0.3, 0.2), strict=True))


@pytest.fixture
def seeded(tmp_path):
    """Three seeds of uniform and of Chameleon, of which two are the same."""
    runs = []
    for name, averages, weights, signs in (
        ("uniform", {1: 20.0, 2: 22.0, 3: 24.0}, EVEN, (-3, 0, 3)),
        ("chameleon", {2: 19.0, 3: 20.0, 4: 21.0}, SKEWED, (-3, 3, 0)),
    ):
        for seed, average in averages.items():
            run = write_training_run(tmp_path / f"{name}-seed{seed}", weights, name)
            result = evaluation(NAMES, [math.log(average + sign) for sign in signs])
            runs.append(Evaluated(run.root.name, run.root.name, result, run))
    return Comparison(tuple(runs), runs[0])


def test_seeds_are_reported_by_mean_and_deviation_and_paired(seeded):
    # Averages: Uniform 20, 22, 24; Chameleon 19, 20, 21; of seeds 2 and 3 -3 and -4.
    (sentence,) = findings(seeded)
    assert sentence == (
        "Chameleon has an average perplexity of 20.00 ± 1.00 over 3 seeds, Uniform of "
        "22.00 ± 2.00 over 3 seeds (-9.1%, -3.50 ± 0.71 paired by 2 seeds); Chameleon is lower in "
        "2 of 3 domains."
    )
    table = seed_table(seeded)
    assert table is not None
    assert table.header == ("domain", "perplexity Uniform", "perplexity Chameleon")
    texts = [list(row) for row in (*table.rows, *table.summary)]
    assert texts == [
        [NAMES[0], "19.00 ± 2.00", "17.00 ± 1.00"],
        [NAMES[1], "22.00 ± 2.00", "23.00 ± 1.00"],
        [NAMES[2], "25.00 ± 2.00", "20.00 ± 1.00"],
        ["average", "22.00 ± 2.00", "20.00 ± 1.00"],
        ["domains better than Uniform", "-", "2 of 3"],
    ]
    assert [is_best(row[2]) for row in table.rows] == [True, False, True]
