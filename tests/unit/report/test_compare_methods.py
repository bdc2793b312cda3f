"""Comparing methods with paired seeds: statistics, tables, files and errors."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
from typing import Any

import numpy as np
import pytest

from megatron_chameleon.artifacts import Cost, EvaluationResult, SampledTokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.online.options import online_columns
from megatron_chameleon.report.compare_methods import (
    compare_methods,
    comparison_table,
    domain_table,
    downstream_table,
    load_comparison,
    mixture_label,
    require_choice,
    require_results,
    tokens_to_reach,
)
from megatron_chameleon.report.options import CompareMethodsOptions
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.tables import is_best
from tests.unit.report.samples import (
    AVERAGES,
    NAMES,
    SEEDS,
    SHARES,
    STEP,
    WEIGHTS,
    downstream,
    edit,
    edit_evaluation,
    evaluation,
    made_by,
    rows_of,
    write_checkpoint,
    write_seeded_runs,
    write_training_run,
)


@pytest.fixture
def root(tmp_path):
    return write_seeded_runs(tmp_path / "run")


def test_held_out_domains_are_not_in_the_averages(root):
    options = CompareMethodsOptions(run=root, mixtures=("uniform", "chameleon"), seeds=SEEDS)
    before = load_comparison(RunFolder.load(root), options)
    for number, path in enumerate(sorted((root / "6-evaluation").glob("*.json"))):
        found = EvaluationResult.load(path).domains
        target = evaluation(["target"], [math.log(7.0 + number)]).domains
        edit(path, domains={**found, **target}, held_out=["target"])
    after = load_comparison(RunFolder.load(root), options)
    assert np.array_equal(after.averages, before.averages)
    assert comparison_table(after).summary == comparison_table(before).summary
    rows = rows_of(domain_table(after))
    assert [*rows] == [*rows_of(domain_table(before)), "target (held-out)"]
    # The files of Chameleon come first, then those of DoReMi and of Uniform.
    assert [cell.split()[0] for cell in rows["target (held-out)"]] == ["14.00", "8.00"]
    assert after.details["uniform"]["held_out_perplexity"]["seed 2"] == pytest.approx(
        {"target": 14.0}
    )


def test_tokens_to_reach_a_loss_are_interpolated():
    curve = {100: 5.0, 200: 4.0, 300: 4.2, 400: 3.0}
    found = [tokens_to_reach(curve, loss) for loss in (6.0, 4.25, 4.0, 3.3, 2.9)]
    assert found == [100, pytest.approx(175), 200, pytest.approx(375), None]


def options_for(root, **changes):
    values = {"run": root, "mixtures": tuple(WEIGHTS), "seeds": SEEDS, "name": "table", **changes}
    return CompareMethodsOptions(**values)


def table_of(root):
    return comparison_table(load_comparison(RunFolder.load(root), options_for(root)))


def test_the_table_shows_weights_perplexity_and_cost(root):
    (root / "4-mixture/uniform.json").unlink()  # --mixture uniform needs no file
    table = table_of(root)
    assert table.header == ("weight of", "Uniform", "UniMax", "Chameleon", "DoReMi")
    expected = """\
code | 0.3333 | 0.3333 | 0.5000 | 0.1000
average perplexity | 100.00 | 100.00 | 90.33 | 120.00
  standard deviation across seeds | 4.00 | 4.00 | 4.51 | 2.00
  difference from Uniform, paired by seed | - | +0.00 | -9.67 | +20.00
  half of its 95% interval, corrected by Holm's method | - | 0.00 | 2.07 | 4.97
average loss | 4.5087 | 4.5087 | 4.4068 | 4.6915
  standard deviation across seeds | 0.0400 | 0.0400 | 0.0498 | 0.0167
  difference from Uniform, paired by seed | - | +0.0000 | -0.1020 | +0.1828
  half of its 95% interval, corrected by Holm's method | - | 0.0000 | 0.0365 | 0.0580
domains better than Uniform | - | 0 of 3 | 3 of 3 | 0 of 3
FLOPs to obtain the mixture | 0 | 0 | 1.20e+12 | 6.00e+12
device-seconds to obtain the mixture | 0.0 | 0.0 | 125.0 | 500.0
FLOPs / Chameleon's | 0.00x | 0.00x | 1.00x | 5.00x
device-seconds / Chameleon's | 0.00x | 0.00x | 1.00x | 4.00x"""
    rows = [row for row in (*table.rows, *table.summary) if row[0] not in NAMES[1:]]
    assert "\n".join(" | ".join(row) for row in rows) == expected
    assert [is_best(cell) for cell in rows[1][1:]] == [False, False, True, False]


def test_a_table_with_validation_curves_and_an_online_method(root):
    sampled = {
        name: SampledTokens(1 / 3, 1.0, n, 1.0) for name, n in zip(NAMES, (5, 3, 2), strict=True)
    }
    for seed in SEEDS:
        base = root / f"5-base/odm-seed{seed}"
        digest = write_checkpoint(base / STEP, base.name.encode())
        write_training_run(
            base,
            dict(zip(NAMES, (0.6, 0.2, 0.2), strict=True)),
            "uniform",
            checkpoints=[STEP],
            provenance=made_by(seed=seed, online={"online": "odm"}),
            tokens=10,
            domain_tokens=sampled,
            cost=Cost(1.25e13 + 4e9, 60.0, 30.0, 2),
        )
        result = EvaluationResult.load(root / f"6-evaluation/doremi-seed{seed}.json")
        result = dataclasses.replace(result, checkpoint_hash=digest)
        result.save(root / f"6-evaluation/{base.name}.json")
        for name, losses in (("uniform", (6.0, 5.0)), ("doremi", (6.0, 5.5))):
            lines: list[dict[str, Any]] = [
                {"step": step, "validation_loss": dict.fromkeys(NAMES, loss + (seed - 2) / 10)}
                for step, loss in zip((100, 200), losses, strict=True)
            ]
            path = root / f"5-base/{name}-seed{seed}/metrics.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = options_for(root, mixtures=("uniform", "doremi", "odm"))
    table = comparison_table(load_comparison(RunFolder.load(root), options))
    rows = rows_of(table)
    assert table.header == ("weight of", "Uniform", "DoReMi", "ODM (online)")
    assert rows[NAMES[0]] == ["0.3333", "0.1000", "0.5000"]
    assert rows["FLOPs to obtain the mixture"] == ["0", "6.00e+12", "4.00e+09"]
    # Uniform's loss falls from 6 to 5 between the steps 100 and 200 of 512 tokens.
    key = "tokens for which Uniform has the same validation loss"
    assert rows[key] == ["102,400", "76,800", "-"]
    assert rows["tokens until the last validation loss of Uniform"][1] == "> 102,400"
    # The sampling of an online method may follow the target.
    followed = made_by(seed=2, online={"online": "odm"}, target={"target": "code"})
    edit(root / "5-base/odm-seed2/run.json", provenance=followed)
    with pytest.raises(UserError, match="differ in the option target"):
        load_comparison(RunFolder.load(root), options)
    edit(root / "5-base/odm-seed2/run.json", provenance=made_by(seed=2))
    with pytest.raises(UserError, match="trained with no --online method"):
        load_comparison(RunFolder.load(root), options)


def test_all_files_and_the_record_are_written(root, tmp_path, capsys):
    command, record = "bash examples/compare_methods.sh", tmp_path / "results/mini.json"
    options = options_for(root, record=record, command=command, wall_seconds=1800.0)
    compared = compare_methods(options)
    report = root / "7-report"
    assert capsys.readouterr().out.startswith((report / "table.txt").read_text())
    assert (report / "table.png").read_bytes().startswith(b"\x89PNG")
    body = json.loads((report / "table.json").read_text())
    chameleon, doremi = body["mixtures"]["chameleon"], body["mixtures"]["doremi"]
    assert doremi["flops_by_reference"] == pytest.approx(5)
    assert chameleon["mean_perplexity"]["code"] == pytest.approx(0.5 * 271 / 3)
    deviation = 0.5 * float(np.std(AVERAGES["chameleon"], ddof=1))
    assert chameleon["perplexity_standard_deviation"]["code"] == pytest.approx(deviation)
    assert body["mixtures"]["unimax"]["same_models_as"] == "Uniform"
    assert body["spread"] == pytest.approx(compared.spread)
    lines = list(csv.DictReader((report / "table.csv").read_text().splitlines()))
    assert [line["mixture"] for line in lines] == list(WEIGHTS)
    assert float(lines[2]["average_perplexity_seed_2"]) == pytest.approx(95)
    assert float(lines[2]["weight:code"]) == 0.5
    line = "| average perplexity | 100.00 | 100.00 | **90.33** | 120.00 |"
    for page in (report / "table.md", record.with_suffix(".md")):
        assert line in page.read_text()
    recorded = json.loads(record.read_text())
    assert {key: recorded[key] for key in body} == body
    assert (recorded["command"], recorded["wall_seconds"]) == (command, 1800.0)
    assert recorded["machine"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("path", "changes", "named"),
    [
        ("5-base/doremi-seed2/run.json", {"status": "running"}, "is running"),
        ("6-evaluation/doremi-seed2.json", {"step": 100}, "step 100 of"),
        ("5-base/doremi-seed2/checkpoints", None, "no checkpoint"),
        ("4-mixture/doremi.json", {"weights": {"code": 1.0}}, "other weights than"),
        (
            "5-base/doremi-seed3/run.json",
            {"provenance": made_by(seed=3, pretrained_checkpoint="other")},
            "differ in the option pretrained_checkpoint",
        ),
        ("5-base/doremi-seed3/run.json", {"provenance": made_by(seed=1)}, "trained with --seed 1"),
    ],
)
def test_runs_that_cannot_be_compared_are_rejected(root, path, changes, named):
    if changes is None:
        shutil.rmtree(root / path)
    else:
        edit(root / path, **changes)
    with pytest.raises(UserError, match=named):
        table_of(root)


def test_a_measured_target_and_the_first_weights_of_each_seed_may_differ(root):
    expected = rows_of(table_of(root))
    for path in (root / "5-base").glob("*-seed*/run.json"):
        method, _, seed = path.parent.name.partition("-seed")
        target = {"target": {"target": "code", "keep_best": True}} if method == "doremi" else {}
        first = f"uniform-seed{seed}"
        edit(path, provenance=made_by(seed=int(seed), pretrained_checkpoint=first, **target))
    assert rows_of(table_of(root)) == expected


def test_an_option_that_a_record_lacks_has_its_default(root):
    expected = rows_of(table_of(root))
    path = root / "5-base/doremi-seed3/run.json"
    later = {"optimizer": {"optimizer": "adam", "lr": 1e-2}, "deterministic": False}
    edit(path, provenance=made_by(seed=3, **later))
    assert rows_of(table_of(root)) == expected
    for changed in ({"deterministic": True}, {"optimizer": {"optimizer": "muon", "lr": 1e-2}}):
        edit(path, provenance=made_by(seed=3, **{**later, **changed}))
        with pytest.raises(UserError, match=f"differ in the option {min(changed)}"):
            table_of(root)


def test_incomplete_cost_is_unknown_and_has_no_ratio(root):
    edit(root / "4-mixture/doremi.json", parameters={"made_from": ["lost"]})
    table = table_of(root)
    rows = rows_of(table)
    assert rows["FLOPs to obtain the mixture"][2:] == ["1.20e+12", "unknown"]
    assert rows["FLOPs / Chameleon's"] == ["0.00x", "0.00x", "1.00x", "-"]
    assert "The cost of DoReMi is unknown: no cost is recorded for lost." in table.notes


def test_the_training_of_an_existing_model_is_no_cost(root):
    shutil.rmtree(root / "2-proxy")
    folder = RunFolder.load(root)
    for existing, flops in ((False, "unknown"), (True, "2.00e+11")):
        options = options_for(root, existing_model=existing)
        rows = rows_of(comparison_table(load_comparison(folder, options)))
        assert rows["FLOPs to obtain the mixture"] == ["0", "0", flops, "6.00e+12"]


def test_downstream_accuracies_are_averaged_over_seeds(root, capsys):
    for name, values in (("uniform", (0.4, 0.5, 0.6)), ("chameleon", (0.6, 0.6, 0.9))):
        for seed, accuracy in zip(SEEDS, values, strict=True):
            run = f"{name}-seed{seed}"
            digest = EvaluationResult.load(root / f"6-evaluation/{run}.json").checkpoint_hash
            # The second task lacks a number of shots, so averages leave it out.
            result = downstream(
                {"copa": {0: accuracy, 1: accuracy + 0.1}, "piqa": {0: 0.5}, "sciq": {0: 0, 1: 0}},
                checkpoint_hash=digest,
            )
            result.save(root / f"6-evaluation/{run}-downstream.json")
    options = options_for(root)
    compared = compare_methods(options)
    assert "Downstream accuracy" in capsys.readouterr().out
    table = downstream_table(compared)
    # UniMax has the models of Uniform; DoReMi has no results.
    assert table.header == ("task", "Uniform", "UniMax", "Chameleon")
    rows = rows_of(table)
    assert rows["copa"] == ["55.0 ± 10.0", "55.0 ± 10.0", "75.0 ± 17.3"]
    assert rows["piqa"] == ["-", "-", "-"]
    assert rows["average"] == ["27.5 ± 5.0", "27.5 ± 5.0", "37.5 ± 8.7"]
    assert rows["tasks better than Uniform"] == ["-", "0 of 2", "1 of 2"]
    found = json.loads((root / "7-report/table.json").read_text())["mixtures"]
    assert found["chameleon"]["downstream_accuracy"]["seed 3"] == {
        "copa": pytest.approx(0.95),
        "sciq": 0,
    }
    assert found["doremi"]["downstream_accuracy"] == {}
    check = options_for(root, mixtures=("chameleon",), check="downstream")
    require_results(check)
    path = root / "6-evaluation/chameleon-seed2-downstream.json"
    shutil.copy(root / "6-evaluation/uniform-seed2-downstream.json", path)
    stale = r"chameleon-seed2-downstream\.json evaluates other weights"
    with pytest.raises(UserError, match=stale):
        require_results(check)
    with pytest.raises(UserError, match=stale):
        load_comparison(RunFolder.load(root), options)


def test_mixtures_of_adjacent_rank_within_noise_are_named(root):
    for seed, average in zip(SEEDS, (91.0, 94.0, 87.0), strict=True):
        losses = [math.log(average * share) for share in SHARES]
        edit_evaluation(root, f"uniform-seed{seed}", domains=evaluation(NAMES, losses).domains)
    compared = load_comparison(RunFolder.load(root), options_for(root, baseline="doremi"))
    assert compared.spread is not None
    assert compared.spread["are_distinguishable"]
    table = comparison_table(compared)
    assert any("between Chameleon and Uniform" in note for note in table.notes)
    assert not any("No significant difference between" in n for n in table_of(root).notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": (1, 2, 2)}, "--seeds 1 2 2: "),
        ({"reference": "chamelon"}, "--reference chamelon is not among --mixtures"),
        ({"mixtures": ("uniform", "printed-humans")}, "--mixtures printed-humans: unknown method"),
    ],
)
def test_invalid_choice_is_rejected(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        require_choice(options_for(tmp_path, **changes), ("uniform", "doremi", "regmix"))


def test_printed_and_online_columns_are_choices(tmp_path):
    names = ("uniform", "printed-human", "chameleon-online")
    require_choice(options_for(tmp_path, mixtures=names), ("uniform", *online_columns()))
    assert online_columns()["chameleon-online"] == "chameleon"
    labels = [mixture_label(name) for name in names]
    assert labels == ["Uniform", "Human (printed)", "Chameleon (online)"]


def test_missing_or_stale_evaluations_are_rejected(root):
    both = {"mixtures": ("uniform", "doremi"), "check": "evaluations"}
    require_results(options_for(root, **both))
    shutil.copy(root / "6-evaluation/uniform-seed2.json", root / "6-evaluation/doremi-seed2.json")
    with pytest.raises(UserError, match=r"doremi-seed2\.json evaluates other weights"):
        require_results(options_for(root, **both))
    (root / "6-evaluation/uniform-seed3.json").unlink()
    with pytest.raises(UserError, match=r"uniform-seed3\.json"):
        require_results(options_for(root, **both))
