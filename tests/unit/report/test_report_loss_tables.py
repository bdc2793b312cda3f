"""Losses with standard errors, paired differences and bits per byte, against plain counts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from megatron_chameleon.artifacts import Clusters, DomainLoss, EvaluationResult
from megatron_chameleon.report.comparison import compare
from megatron_chameleon.report.perplexity import bits_per_byte_table, loss_table
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.tables import is_best
from tests.unit.report.report_samples import NAMES, perplexity_of, write_run_folder

RUNS = ("uniform-seed1", "chameleon-pretrain-seed1")
TOKENS = [20, 30, 50]


def domain(losses, text_bytes=(60, 90, 150)):
    """A domain of three documents with these mean losses."""
    sums = [loss * tokens for loss, tokens in zip(losses, TOKENS, strict=True)]
    clusters = Clusters(sums, TOKENS, list(text_bytes) if text_bytes else None)
    size = sum(text_bytes) if text_bytes else None
    return DomainLoss(sum(sums) / sum(TOKENS), sum(TOKENS), 6.0, size, clusters)


@pytest.fixture
def losses():
    """For each run and domain, the loss of each document; the second run is surely lower in the
    first domain, surely higher in the second, and in the third nobody knows."""
    hard = {name: np.array([2.0, 3.0, 4.0]) + i for i, name in enumerate(NAMES)}
    shifts = dict(zip(NAMES, ([-0.11, -0.1, -0.1], [0.1, 0.1, 0.12], [-0.5, 0.4, 0]), strict=True))
    return {RUNS[0]: hard, RUNS[1]: {name: hard[name] + shifts[name] for name in NAMES}}


@pytest.fixture
def root(tmp_path, losses):
    root = write_run_folder(tmp_path / "run")
    for run in RUNS:
        path = root / f"6-evaluation/{run}.json"
        domains = {name: domain(losses[run][name]) for name in NAMES}
        dataclasses.replace(EvaluationResult.load(path), domains=domains).save(path)
    return root


def rows_of(table):
    return {row[0]: list(row[1:]) for row in (*table.rows, *table.summary)}


def figure_of(text):
    """Value and standard error of a cell."""
    value, _, error = text.partition(" ± ")
    return float(value), float(error)


def test_losses_and_paired_differences_have_their_errors(root, losses):
    table = loss_table(compare(RunFolder.load(root)))
    assert table.header == (
        "domain",
        "tokens",
        "loss Uniform",
        "loss Chameleon",
        "Chameleon minus Uniform",
    )
    weights = np.array(TOKENS) / sum(TOKENS)
    for name in NAMES:
        tokens, *cells = rows_of(table)[name]
        assert tokens == "100"
        first, second = (losses[run][name] for run in RUNS)
        for cell, values in zip(cells, (first, second, second - first), strict=True):
            mean = weights @ values
            error = math.sqrt(3 / 2 * ((weights * (values - mean)) ** 2).sum())
            assert figure_of(cell) == pytest.approx((mean, error), abs=6e-5)


def test_only_differences_beyond_two_errors_are_counted(root):
    found = rows_of(loss_table(compare(RunFolder.load(root))))
    assert found["surely lower"][-1] == "1 of 3"
    assert found["surely higher"][-1] == "1 of 3"


def test_bits_per_byte_are_shown_and_the_lowest_is_marked(root, losses):
    table = bits_per_byte_table(compare(RunFolder.load(root)))
    assert table is not None
    assert table.header == ("domain", "bytes of text", "Uniform", "Chameleon")
    for row, better in zip(table.rows, (1, 0, 0), strict=True):
        assert row[1] == "300"
        assert [is_best(cell) for cell in row[2:]] == [better == 0, better == 1]
        for cell, run in zip(row[2:], RUNS, strict=True):
            expected = domain(losses[run][row[0]])
            value, error = figure_of(cell)
            assert value == pytest.approx(expected.bits_per_byte, abs=6e-5)
            assert error == pytest.approx(expected.bits_per_byte_error, abs=6e-5)


def test_the_verdict_says_how_sure_the_difference_of_averages_is(root, losses):
    (verdict,) = [n for n in perplexity_of(RunFolder.load(root)).notes if "lower in" in n]
    mean = {
        run: np.mean([domain(values).perplexity for values in losses[run].values()]) for run in RUNS
    }
    difference = mean[RUNS[1]] - mean[RUNS[0]]
    assert f"%, {difference:+.2f} ± " in verdict


def test_results_without_clusters_or_bytes_show_what_is_known(tmp_path):
    folder = RunFolder.load(write_run_folder(tmp_path / "bare"))
    comparison = compare(folder)
    found = rows_of(loss_table(comparison))
    expected = comparison.runs[0].result.domains[NAMES[0]].loss
    assert found[NAMES[0]][1] == f"{expected:.4f}"
    assert "±" not in "".join(found[NAMES[0]])
    assert found["surely lower"][-1] == "-"
    assert bits_per_byte_table(comparison) is None


def test_a_run_alone_has_no_differences(root):
    (root / f"6-evaluation/{RUNS[1]}.json").unlink()
    table = loss_table(compare(RunFolder.load(root)))
    assert table.header == ("domain", "tokens", "loss Uniform")
    assert table.summary == []
