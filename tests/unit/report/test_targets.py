"""Comparing methods over targets: gains, their significance, predictions and files."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from megatron_chameleon.artifacts import EvaluationResult, Mixture
from megatron_chameleon.corpus.join import link_domains
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.options import CompareMethodsOptions
from megatron_chameleon.report.targets import compare_targets, gain_table, prediction_table
from tests.unit.report.samples import (
    NAMES,
    SEEDS,
    edit,
    evaluation,
    rows_of,
    write_corpus,
    write_seeded_runs,
)


@pytest.fixture
def root(tmp_path):
    return write_seeded_runs(tmp_path / "run")


def hold_out(root, folder, target, gain):
    """Copy a comparison, with ``target`` as a held-out domain that Chameleon lowers by ``gain``."""
    shutil.copytree(root, folder)
    shutil.rmtree(folder / "1-corpus")
    corpus = write_corpus(folder / "all", [*NAMES, "other", target])
    link_domains(corpus, folder / "1-corpus", NAMES, ["other", target]).save()
    for path in (folder / "6-evaluation").glob("*.json"):
        seed = int(path.stem[-1])
        loss = 3.0 - (gain + 0.01 * seed) * path.name.startswith("chameleon")
        measured = evaluation(["other", target], [9.0, loss]).domains
        found = EvaluationResult.load(path).domains
        edit(path, domains={**found, **measured}, held_out=["other", target])


def test_only_the_named_targets_are_compared(root, tmp_path):
    run = tmp_path / "targets-run"
    hold_out(root, run / "targets/my%20notes", "my notes", 0.5)
    hold_out(root, run / "targets/earlier", "earlier", 0.25)

    def gains(*names):
        options = CompareMethodsOptions(
            run=run, mixtures=("uniform", "chameleon"), seeds=SEEDS, targets=names
        )
        compared = compare_targets(options)
        recorded = json.loads((run / "7-report/compare_methods-targets.json").read_text())
        assert list(recorded["targets"]) == list(compared.losses.index)
        return compared.table.set_index("target")["gain"].to_dict()

    assert gains("my notes") == pytest.approx({"my notes": 0.52})
    assert gains() == pytest.approx({"earlier": 0.27, "my notes": 0.52})
    with pytest.raises(UserError, match="lost"):
        gains("my notes", "lost")
    (run / "targets/earlier").rename(run / "targets/renamed")
    with pytest.raises(UserError, match="renamed"):
        gains()


def test_gains_are_tested_together_and_compared_with_predictions(root, tmp_path):
    run = tmp_path / "targets-run"
    for name, gain in (("a", 0.5), ("b", -0.4), ("c", -0.02)):
        hold_out(root, folder := run / f"targets/{name}", name, gain)
        edit(
            folder / "4-mixture/chameleon.json",
            parameters={"predicted_gain": {"uniform": {"gain": gain + 0.12}}},
        )
    options = CompareMethodsOptions(
        run=run, mixtures=("uniform", "unimax", "chameleon"), seeds=SEEDS, targets=()
    )
    compared = compare_targets(options)
    rows = rows_of(gain_table(compared))
    assert [rows[name][1:] for name in "abc"] == [
        ["= Uniform", "+0.520*"],
        ["= Uniform", "-0.380*"],
        ["= Uniform", "+0.000"],
    ]
    assert rows["significantly better"] == ["", "0 of 3", "1 of 3"]
    assert rows["significantly worse"] == ["", "0 of 3", "1 of 3"]
    # Seeds differ by 0.01, so the mean of three has an error of 0.01 / sqrt(3).
    assert compared.pooled_error == pytest.approx((0.01 / 3**0.5, 6))
    (row,) = prediction_table(compared).rows
    assert row == ["Chameleon", "3", "+0.147", "+0.047", "0.100", "1.00", "1.00"]


def test_correlations_need_three_mixtures_other_than_the_baseline(root, tmp_path):
    run = tmp_path / "targets-run"
    for name, gain in (("a", 0.5), ("b", 0.2), ("c", 0.0)):
        hold_out(root, folder := run / f"targets/{name}", name, gain)
        changes: dict[str, Any] = {"parameters": {"predicted_gain": {"uniform": {"gain": gain}}}}
        if name == "c":
            equal = Mixture.load(folder / "4-mixture/uniform.json").weights
            changes = {"weights": equal, "parameters": {"written": "prior"}}
            for path in (folder / "5-base").glob("chameleon-*"):
                shutil.rmtree(path)
        edit(folder / "4-mixture/chameleon.json", **changes)
    options = CompareMethodsOptions(
        run=run, mixtures=("uniform", "chameleon"), seeds=SEEDS, targets=()
    )
    (row,) = prediction_table(compare_targets(options)).rows
    assert row == ["Chameleon", "3", "+0.233", "+0.247", "0.013", "-", "-"]
