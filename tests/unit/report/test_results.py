"""Comparison of evaluated runs: perplexity, loss, bits per byte, seeds, and errors."""

from __future__ import annotations

import dataclasses
import math
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import (
    Clusters,
    Cost,
    DomainLoss,
    Mixture,
    TargetLoss,
    TargetShares,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.page import load_report
from megatron_chameleon.report.results import (
    ComparedRuns,
    Evaluated,
    caveats,
    compare,
    findings,
    held_out_findings,
    loss_table,
    perplexity_table,
    seed_table,
    target_table,
)
from megatron_chameleon.report.run_folder import RunFolder, merge
from megatron_chameleon.report.significance import (
    LEAST_RATIO,
    holm,
    loss_difference,
    mean_perplexity_difference,
    paired_difference,
    spread_of,
)
from megatron_chameleon.report.tables import is_best
from tests.unit.artifacts.test_evaluation_result import CLUSTERS, plain_error
from tests.unit.artifacts.test_evaluation_result import domain as clustered
from tests.unit.artifacts.test_evaluation_result import result as result_of
from tests.unit.report.samples import (
    CHAMELEON,
    NAMES,
    PROTOCOL,
    PROVENANCE,
    UNIFORM,
    edit,
    edit_evaluation,
    evaluation,
    random_mixture,
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
    assert better[-2:] == ["-", "1 of 3"]  # an equal perplexity is not better
    marks = [[is_best(cell) for cell in row[-2:]] for row in table.rows]
    assert marks == [[False, True], [True, False], [True, True]]
    assert [is_best(cell) for cell in table.summary[0][-2:]] == [True, False]
    change = 100 * (chameleon / uniform - 1)
    (sentence,) = findings(compare(folder))
    for figure in (f"{chameleon:.2f}", f"{uniform:.2f} (+{change:.1f}%)", "1 of 3"):
        assert figure in sentence


def test_held_out_domains_are_rows_outside_averages_and_counts(root):
    names = [*NAMES, "target"]
    before = compare(RunFolder.load(root))
    averages = [run.result.mean_perplexity for run in before.runs]
    for run, loss in ((UNIFORM, 9.0), (CHAMELEON, 1.0)):
        kept = next(each.result for each in before.runs if each.name == run).domains
        added = evaluation(names, [0.0, 0.0, 0.0, loss]).domains["target"]
        edit_evaluation(root, run, domains={**kept, "target": added}, held_out=["target"])
    folder = RunFolder.load(root)
    after = compare(folder)
    assert [run.result.mean_perplexity for run in after.runs] == averages
    assert findings(after) == findings(before)
    (sentence,) = held_out_findings(after)
    assert sentence.startswith("On target, which is held out, Chameleon has a loss of 1.0000")
    assert "-8.0000" in sentence
    for with_target, without in (
        (perplexity_table(folder, after), perplexity_table(folder, before)),
        (loss_table(after), loss_table(before)),
    ):
        assert with_target.summary == without.summary
        assert rows_of(with_target).keys() - rows_of(without).keys() == {"target (held-out)"}
    row = rows_of(perplexity_table(folder, after))["target (held-out)"]
    assert row[-2:] == [f"{math.exp(9):.2f}", f"{math.exp(1):.2f}"]


def test_runs_are_compared_on_the_target(root):
    assert target_table(compare(RunFolder.load(root))) is None
    shares = {NAMES[0]: 0.75, NAMES[1]: 0.25}
    tokens = [20, 30, 50]
    rates = np.random.default_rng(0).normal(3.0, 0.2, (2, 2, 3))  # run, domain, document
    sums = rates * tokens
    for run, losses in zip((UNIFORM, CHAMELEON), sums, strict=True):
        domains = evaluation(NAMES, [1.0, 2.0, 3.0]).domains
        for name, each in zip(shares, losses, strict=True):
            clusters = Clusters(each.tolist(), tokens)
            domains[name] = DomainLoss(each.sum() / 100, 100, 6.0, clusters=clusters)
        target = TargetLoss.of(TargetShares("target", shares), domains)
        edit_evaluation(root, run, domains=domains, target=target)
    table = target_table(compare(RunFolder.load(root)))
    assert table is not None
    first, second = table.rows
    losses = sums.sum(2) @ [0.75, 0.25] / 100
    assert [row[1].split()[0] for row in (first, second)] == [f"{loss:.4f}" for loss in losses]
    assert second[2].split()[0] == f"{math.exp(losses[1]):.2f}"
    assert first[3:] == ["-", "-"]
    gap = losses[1] - losses[0]
    residuals = sums[1] - sums[0]
    residuals = residuals - residuals.sum(1, keepdims=True) / 100 * tokens
    errors = np.sqrt(3 / 2 * (residuals**2).sum(1)) / 100
    half = 1.96 * math.hypot(0.75 * errors[0], 0.25 * errors[1])
    assert second[3:] == [f"{gap:+.4f}", f"{gap - half:+.4f} to {gap + half:+.4f}"]
    assert load_report([root]).tables[0].title == "Target"
    edit_evaluation(root, CHAMELEON, target=None)
    other = target_table(compare(RunFolder.load(root)))
    assert other is not None
    assert other.rows[1][1:] == ["-"] * 4


@pytest.mark.parametrize("name", ["chameleon-pretrain", "chameleon-pretrain-2k-seed1"])
def test_intervals_come_from_the_mixture_that_the_run_is_named_after(root, rng, name):
    for stage, suffix in (("5-base", ""), ("6-evaluation", ".json")):
        (root / stage / f"{CHAMELEON}{suffix}").rename(root / stage / f"{name}{suffix}")
    own = root / "4-mixture/chameleon-pretrain.json"
    Mixture(Mixture.load(own).weights, "manual").save(root / "4-mixture/best.json")
    folder = RunFolder.load(root)
    assert any("interval" in h for h in perplexity_table(folder, compare(folder)).header)
    assert caveats(folder, compare(folder)) == []
    edit(own, parameters={"written": "prior"})
    folder = RunFolder.load(root)
    (sentence,) = caveats(folder, compare(folder))
    assert "prior" in sentence
    # If the mixture has been recomputed, intervals of the old mixture are not shown.
    random_mixture(NAMES, rng).save(own)
    shutil.copytree(root, copy := root.with_name("copy"))
    edit(copy / "4-mixture/chameleon-pretrain.json", cost=Cost(device_seconds=999.0))
    merged = merge([RunFolder.load(root), RunFolder.load(copy)])
    for folder in (RunFolder.load(root), merged):
        (sentence,) = caveats(folder, compare(folder))
        assert "4-mixture/chameleon-pretrain.json has changed" in sentence
        assert not any("interval" in h for h in perplexity_table(folder, compare(folder)).header)


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


def test_losses_and_paired_differences_have_standard_errors(root):
    tokens = np.array([20, 30, 50])  # tokens of the three documents of a domain
    first = {name: np.array([2.0, 3.0, 4.0]) + i for i, name in enumerate(NAMES)}
    # The losses of the three domains are significantly lower, significantly higher, and similar.
    shifts = zip(NAMES, ([-0.11, -0.1, -0.1], [0.1, 0.1, 0.12], [-0.5, 0.4, 0]), strict=True)
    second = {name: first[name] + shift for name, shift in shifts}
    for run, losses in ((UNIFORM, first), (CHAMELEON, second)):
        domains = {
            name: DomainLoss(
                tokens @ each / 100, 100, 6.0, None, Clusters(list(tokens * each), tokens.tolist())
            )
            for name, each in losses.items()
        }
        if run == CHAMELEON:  # the order of domains does not matter
            domains = dict(reversed(domains.items()))
        edit_evaluation(root, run, domains=domains)
    table = loss_table(compare(RunFolder.load(root)))
    columns = ("loss Uniform", "loss Chameleon", "Chameleon minus Uniform")
    assert table.header == ("domain", "tokens", *columns)
    for name in NAMES:
        count, *cells = rows_of(table)[name]
        assert count == "100"
        expected = (first[name], second[name], second[name] - first[name])
        for cell, values in zip(cells, expected, strict=True):
            mean = tokens @ values / 100
            error = math.sqrt(3 / 2 * ((tokens * (values - mean)) ** 2).sum()) / 100
            assert tuple(map(float, cell.split(" ± "))) == pytest.approx((mean, error), abs=6e-5)


def test_seeds_are_reported_by_mean_and_deviation_and_paired(tmp_path):
    runs = []
    for name, averages, weights, shifts in (
        ("uniform", {1: 20.0, 2: 22.0, 3: 24.0}, (1 / 3, 1 / 3, 1 / 3), (-3, 0, 3)),
        ("chameleon", {2: 19.0, 3: 20.0, 4: 21.0}, (0.5, 0.3, 0.2), (-3, 3, 0)),
    ):
        for seed, average in averages.items():
            mixture = dict(zip(NAMES, weights, strict=True))
            options = dataclasses.replace(PROVENANCE, options={"seed": seed})
            root = tmp_path / f"{name}-seed{seed}"
            run = write_training_run(root, mixture, name, provenance=options)
            result = evaluation(NAMES, [math.log(average + shift) for shift in shifts])
            runs.append(Evaluated(run.root.name, run.root.name, result, run))
    seeded = ComparedRuns(tuple(runs), runs[0])
    # Uniform averages 20, 22, 24, and Chameleon 19, 20, 21; seeds 2 and 3 differ by -3 and -4.
    (sentence,) = findings(seeded)
    for figure in ("20.00 ± 1.00", "22.00 ± 2.00", "-9.1%", "-3.50 ± 0.71", "2 of 3"):
        assert figure in sentence
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


def test_a_paired_difference_removes_the_effect_of_the_seed():
    theirs = np.array([100.0, 140.0, 60.0])
    found = paired_difference(theirs - np.array([9.0, 10.0, 11.0]), theirs)
    error = 1 / math.sqrt(3)
    assert found == pytest.approx((-10, error, 4.302653 * error))


def test_holm_corrects_p_values_and_intervals_step_by_step():
    # t = 20, 10/3, 5 and 1 with two degrees of freedom; p = 1 - t / sqrt(t^2 + 2) by hand.
    errors = np.array([0.1, 0.3, 0.2, 1.0])
    steps = np.array([-1, 0, 1]) * math.sqrt(3)
    found, halves = holm(np.array([2.0, 1.0, 1.0, 1.0])[:, None] + errors[:, None] * steps)
    statistics = np.array([20, 10 / 3, 5, 1])
    p = 1 - statistics / np.sqrt(statistics**2 + 2)
    # Only the first test rejects: 4 p = 0.00995; then 3 * 0.0377 = 0.113, 2 * 0.0796, and 0.423.
    assert found == pytest.approx([4 * p[0], 2 * p[1], 3 * p[2], p[3]])
    # Student's t for 95% / 4 and, from the test that does not reject on, 95% / 3.
    quantiles = np.array([8.8602, 7.6488, 7.6488, 7.6488])
    assert halves == pytest.approx(quantiles * errors, rel=1e-3)


def test_spread_between_seeds_is_the_residual_of_the_additive_model(rng):
    additive = np.array([[10.0, 20.0, 30.0], [13.0, 23.0, 33.0]])
    residual = np.array([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]])
    for averages, seeds in ((additive, 0), (additive + residual, math.sqrt(4 / 2))):
        found = spread_of(averages)
        assert found["between_seeds"] == pytest.approx(seeds, abs=1e-12)
        assert found["between_mixtures"] == pytest.approx(3 / math.sqrt(2))
    ratios = np.array([spread_of(rng.normal(size=(8, 3)))["ratio"] for _ in range(2000)])
    assert np.sqrt(np.mean(ratios**2)) == pytest.approx(1 / math.sqrt(3), rel=0.15)
    assert np.mean(ratios >= LEAST_RATIO) < 0.001


@given(CLUSTERS, st.lists(st.floats(0, 100), min_size=20, max_size=20))
def test_paired_difference_has_the_error_of_the_differences(clusters, other):
    losses, tokens = (list(values) for values in zip(*clusters, strict=True))
    first, second = clustered(losses, tokens), clustered(other[: len(losses)], tokens)
    found = loss_difference(first, second)
    differences = [a - b for a, b in zip(losses, other, strict=False)]
    assert found.value == first.loss - second.loss
    assert found.error == pytest.approx(plain_error(differences, tokens), rel=1e-6, abs=1e-9)


def test_error_of_a_mean_perplexity_difference_matches_samples():
    rng = np.random.default_rng(2)
    tokens = [10] * 50
    found = []
    for _ in range(1000):
        draws = [
            [clustered((10 * rng.normal(level, 0.2, 50)).tolist(), tokens) for level in (2.0, 3.0)]
            for _ in range(2)
        ]
        pair = [result_of(dict(zip("ab", domains, strict=True))) for domains in draws]
        found.append(mean_perplexity_difference(*pair))
    errors = [difference.error for difference in found]
    assert np.std([d.value for d in found]) == pytest.approx(np.mean(errors), rel=0.1)  # type: ignore[arg-type]


def test_other_text_or_overflow_gives_no_error():
    first = clustered([1.0, 2.0], [3, 4])
    beyond = clustered([7000.0, 7000.0], [3, 4])  # its perplexity overflows
    for other in (clustered([1.0, 2.0], [4, 3]), DomainLoss(1.0, 7, 5.0), beyond):
        found = mean_perplexity_difference(result_of({"a": first}), result_of({"a": other}))
        assert found.error is None
