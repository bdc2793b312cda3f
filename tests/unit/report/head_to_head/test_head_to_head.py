"""What is compared head to head, what it cost, and what is refused."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import EvaluationResult, Mixture, TrainingRun
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.head_to_head import (
    Contestant,
    HeadToHead,
    Record,
    Selection,
    as_csv,
    comparison_table,
    domain_table,
    format_multiple,
    head_to_head,
    mixture_label,
    places_of,
    report_head_to_head,
    ticks_of,
)
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.tables import Table, is_best, terminal_table
from tests.unit.report.head_to_head.samples import AVERAGES, SEEDS, WEIGHTS, write_head_to_head

SELECTION = Selection(names=tuple(WEIGHTS), seeds=SEEDS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_head_to_head(tmp_path / "run")


def compared_in(root: Path, **changes: object) -> HeadToHead:
    selection = dataclasses.replace(SELECTION, **changes)  # type: ignore[arg-type]
    return head_to_head(RunFolder.load(root), selection)


def row_of(table: Table, name: str) -> list[str]:
    (found,) = [row for row in (*table.rows, *table.summary) if row[0] == name]
    return list(found[1:])


def cost_of(contestant: Contestant) -> tuple[float, float]:
    assert contestant.cost is not None
    return contestant.cost.flops, contestant.cost.device_seconds


def change(path: Path, **changes: object) -> None:
    body = json.loads(path.read_text()) | changes
    body.pop("checksum", None)
    path.write_text(json.dumps(body))


def test_averages_are_over_domains_for_every_seed(root):
    compared = compared_in(root)
    expected = [AVERAGES["uniform"], AVERAGES["uniform"], AVERAGES["chameleon"], AVERAGES["doremi"]]
    np.testing.assert_allclose(compared.averages, expected)
    assert compared.perplexities.shape == (4, 3, 3)


def test_uniform_weights_need_no_file(root):
    with_file = compared_in(root)
    (root / "4-mixture/uniform.json").unlink()
    without = compared_in(root)
    assert np.array_equal(with_file.perplexities, without.perplexities)
    assert [cost_of(c) for c in without] == [cost_of(c) for c in with_file]


def test_the_cost_of_chameleon_has_its_proxy_and_its_embeddings(root):
    uniform, _, chameleon, doremi = compared_in(root)
    assert cost_of(uniform) == (0, 0)
    assert cost_of(chameleon) == pytest.approx((1.2e12, 125))
    assert set(chameleon.paid.parts) == {
        "4-mixture/chameleon",
        "2-proxy/nano-seed1",
        "3-embeddings/nano",
    }
    assert cost_of(doremi) == (6e12, 500)


def test_the_table_shows_weights_perplexity_and_cost(root):
    table = comparison_table(compared_in(root))
    assert table.header == ("weight of", "Uniform", "UniMax", "Chameleon", "DoReMi")
    assert row_of(table, "code") == ["0.3333", "0.3333", "0.5000", "0.1000"]
    assert row_of(table, "average perplexity") == ["100.00", "100.00", "90.33", "120.00"]
    assert row_of(table, "  standard deviation across seeds") == ["4.00", "4.00", "4.51", "2.00"]
    assert row_of(table, "  minus Uniform's, paired") == ["-", "+0.00", "-9.67", "+20.00"]
    assert row_of(table, "  standard error of that") == ["-", "0.00", "0.33", "1.15"]
    assert row_of(table, "domains better than Uniform") == ["-", "0 of 3", "3 of 3", "0 of 3"]
    assert row_of(table, "FLOPs to obtain the mixture") == ["0", "0", "1.20e+12", "6.00e+12"]
    assert row_of(table, "device-seconds for that") == ["0.0", "0.0", "125.0", "500.0"]
    assert row_of(table, "FLOPs / Chameleon's") == ["0.00x", "0.00x", "1.00x", "5.00x"]
    assert row_of(table, "device-seconds / Chameleon's") == ["0.00x", "0.00x", "1.00x", "4.00x"]
    (average,) = [row for row in table.summary if row[0] == "average perplexity"]
    assert [is_best(cell) for cell in average[1:]] == [False, False, True, False]


def test_the_ratio_of_spreads_is_printed_and_judged(root):
    compared = compared_in(root)
    text = terminal_table(comparison_table(compared))
    # Of the three mixtures with models of their own: means 100, 90.33 and 120.
    between = np.std([100, 271 / 3, 120], ddof=1)
    assert compared.spread is not None
    assert compared.spread.mixtures == pytest.approx(between)
    assert f"{between:.2f} / {compared.spread.seeds:.2f} = {compared.spread.ratio:.1f}" in text
    assert "the mixtures are distinguishable" in " ".join(text.split())
    assert "UniMax has the weights of Uniform: the same models are shown." in text
    assert "Chameleon < Uniform < DoReMi" in text


@pytest.mark.parametrize(
    "names", [("unimax", "uniform", "chameleon"), ("chameleon", "unimax", "doremi", "uniform")]
)
def test_the_order_of_the_columns_is_free(root, names):
    """UniMax has no models of its own, and shows Uniform's wherever that stands."""
    first, compared = compared_in(root), compared_in(root, names=names)
    assert [c.name for c in compared] == list(names)
    assert {c.name: c.twin_of for c in compared if c.twin_of} == {"unimax": "Uniform"}
    for name in names:
        one, other = names.index(name), list(WEIGHTS).index(name)
        np.testing.assert_array_equal(compared.averages[one], first.averages[other])


def test_mixtures_that_are_all_the_same_have_no_spread(root, capsys):
    selection = dataclasses.replace(SELECTION, names=("uniform", "unimax"))
    compared = report_head_to_head(root, selection, "table")
    assert compared.spread is None
    said = " ".join(capsys.readouterr().out.split())
    assert "All of these mixtures have the same weights and show the same models" in said
    assert "Spread between mixtures over" not in said
    assert "In the order of average perplexity" not in said
    assert json.loads((root / "7-report/table.json").read_text())["spread"] is None


@pytest.mark.parametrize("baseline", ["uniform", "unimax"])
def test_one_and_the_same_models_are_never_called_unclear(root, baseline):
    notes = " ".join(comparison_table(compared_in(root, baseline=baseline)).notes)
    assert "No significant difference from" not in notes


def test_mixtures_within_noise_are_called_out(root):
    for seed, average in zip(SEEDS, (96.0, 110.0, 98.0), strict=True):
        path = root / f"6-evaluation/chameleon-seed{seed}.json"
        result = EvaluationResult.load(path)
        loss = {
            name: dataclasses.replace(domain, loss=float(np.log(average)))
            for name, domain in result.domains.items()
        }
        dataclasses.replace(result, domains=loss).save(path)
    table = comparison_table(compared_in(root, names=("uniform", "chameleon")))
    notes = " ".join(table.notes)
    assert "the mixtures are not distinguishable" in notes
    assert "No significant difference from Uniform (95% interval" in notes
    assert "seeds): Chameleon." in notes
    assert "No significant difference between neighbours: Uniform and Chameleon." in notes


def test_every_domain_has_its_spread_over_seeds(root):
    table = domain_table(compared_in(root))
    assert row_of(table, "code") == ["50.00 ± 2.00", "50.00 ± 2.00", "45.17 ± 2.25", "60.00 ± 1.00"]
    assert [is_best(cell) for cell in table.rows[0][1:]] == [False, False, True, False]


def test_all_of_it_is_written(root, capsys):
    compared = report_head_to_head(root, SELECTION, "table")
    printed = capsys.readouterr().out
    report = root / "7-report"
    assert printed.startswith((report / "table.txt").read_text())
    assert (report / "table.png").read_bytes().startswith(b"\x89PNG")
    body = json.loads((report / "table.json").read_text())
    chameleon, doremi = body["mixtures"]["chameleon"], body["mixtures"]["doremi"]
    assert (doremi["flops"], doremi["device_seconds"]) == (6e12, 500)
    assert body["reference"] == "chameleon"
    assert doremi["flops_by_reference"] == pytest.approx(5)
    assert doremi["device_seconds_by_reference"] == pytest.approx(4)
    assert chameleon["mean_perplexity"]["code"] == pytest.approx(0.5 * 271 / 3)
    deviation = 0.5 * float(np.std(AVERAGES["chameleon"], ddof=1))
    assert chameleon["perplexity_standard_deviation"]["code"] == pytest.approx(deviation)
    assert body["mixtures"]["unimax"]["same_models_as"] == "Uniform"
    assert compared.spread is not None
    assert body["spread"]["ratio"] == pytest.approx(compared.spread.ratio)
    lines = list(csv.DictReader((report / "table.csv").read_text().splitlines()))
    assert [line["mixture"] for line in lines] == list(WEIGHTS)
    assert float(lines[2]["average_perplexity_seed_2"]) == pytest.approx(95)
    assert float(lines[2]["weight:code"]) == 0.5
    assert lines == list(csv.DictReader(as_csv(compared).splitlines()))
    assert (
        "| average perplexity | 100.00 | 100.00 | **90.33** | 120.00 |"
        in (report / "table.md").read_text()
    )


def test_a_record_says_when_where_and_by_which_command(root, tmp_path):
    command = "SIZE=mini bash examples/compare_methods.sh"
    record = Record.from_options(tmp_path / "results/mini.json", command, 1800.0)
    report_head_to_head(root, SELECTION, "table", record)
    body = json.loads((tmp_path / "results/mini.json").read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", body["date"])
    assert (body["command"], body["wall_seconds"]) == (command, 1800.0)
    assert body["machine"]["device"] == "cpu"
    assert body["machine"]["cores"] >= 1
    assert set(body["mixtures"]) == set(WEIGHTS)
    page = (tmp_path / "results/mini.md").read_text()
    assert f"Made on {body['date']} by `{command}`, in 30 minutes in all" in page
    assert "| average perplexity |" in page


def test_half_a_record_is_refused(tmp_path):
    assert Record.from_options(None, "bash", None) is None
    with pytest.raises(UserError, match="--record also needs --command"):
        Record.from_options(tmp_path / "x.json", None, None)
    with pytest.raises(UserError, match=r"must end in \.json"):
        Record.from_options(tmp_path / "x", "bash", None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seeds": (1, 2)}, r"--seeds 1 2: "),
        ({"seeds": (1, 2, 2)}, r"--seeds 1 2 2: "),
        ({"names": ("uniform",)}, r"--mixtures uniform: "),
        ({"names": ("doremi", "chameleon")}, r"--baseline uniform is not among --mixtures"),
        ({"reference": "chamelon"}, r"--reference chamelon is not among --mixtures uniform unimax"),
        ({"names": ("uniform", "regmix")}, r"4-mixture/regmix\.json is not there; examples/comp"),
        ({"seeds": (1, 2, 4)}, r"5-base/uniform-seed4 is not there"),
        ({"run_suffix": "-1.2b"}, r"5-base/uniform-1\.2b-seed1 is not there"),
    ],
)
def test_what_is_missing_is_told(root, changes, told):
    with pytest.raises(UserError, match=told):
        compared_in(root, **changes)


def test_a_run_that_has_not_finished_is_refused(root):
    change(root / "5-base/doremi-seed2/run.json", status="interrupted")
    with pytest.raises(UserError, match=r"5-base/doremi-seed2 is interrupted; examples/comp"):
        compared_in(root)


def test_an_evaluation_of_an_earlier_step_is_refused(root):
    change(root / "6-evaluation/doremi-seed2.json", step=100)
    with pytest.raises(UserError, match=r"doremi-seed2\.json is of step 100, the run has 200"):
        compared_in(root)


def test_an_evaluation_of_other_weights_is_refused(root):
    """Copied from another run of as many steps, or made before the run was trained anew."""
    ours, other = (root / f"6-evaluation/{name}-seed2.json" for name in ("doremi", "chameleon"))
    shutil.copy(other, ours)
    told = r"doremi-seed2\.json is of other weights than \S+5-base/doremi-seed2/checkpoints/step"
    with pytest.raises(UserError, match=told):
        compared_in(root)


def test_a_run_without_its_checkpoint_has_no_known_evaluation(root):
    shutil.rmtree(root / "5-base/doremi-seed2/checkpoints")
    with pytest.raises(UserError, match=r"5-base/doremi-seed2 has no checkpoint"):
        compared_in(root)


def test_a_mixture_that_was_found_anew_is_refused(root):
    Mixture(weights={"code": 1.0}).save(root / "4-mixture/doremi.json")
    with pytest.raises(UserError, match=r"doremi\.json has changed since 5-base/doremi-seed1"):
        compared_in(root)


def test_runs_of_other_settings_are_refused(root):
    run = TrainingRun.load(root / "5-base/doremi-seed3")
    options = {**run.provenance.options, "optimizer": {"lr": 3e-3}, "log_interval": 7}
    made_by = dataclasses.replace(run.provenance, options=options)
    dataclasses.replace(run, provenance=made_by).save()
    with pytest.raises(UserError, match="differ in the option optimizer"):
        compared_in(root)


def test_a_seed_other_than_the_name_says_is_refused(root):
    run = TrainingRun.load(root / "5-base/doremi-seed3")
    options = {**run.provenance.options, "seed": 1}
    made_by = dataclasses.replace(run.provenance, options=options)
    dataclasses.replace(run, provenance=made_by).save()
    with pytest.raises(UserError, match="doremi-seed3 was trained with --seed 1"):
        compared_in(root)


def test_a_cost_that_is_not_whole_is_unknown_and_never_a_ratio(root):
    change(root / "4-mixture/doremi.json", parameters={"made_from": ["lost"]})
    report_head_to_head(root, SELECTION, "table")
    compared = compared_in(root)
    table = comparison_table(compared)
    assert row_of(table, "FLOPs to obtain the mixture")[2:] == ["1.20e+12", "unknown"]
    assert row_of(table, "device-seconds for that")[2:] == ["125.0", "unknown"]
    assert row_of(table, "FLOPs / Chameleon's") == ["0.00x", "0.00x", "1.00x", "-"]
    assert row_of(table, "device-seconds / Chameleon's") == ["0.00x", "0.00x", "1.00x", "-"]
    assert (
        "The cost of DoReMi is unknown, since these are missing or have no cost: lost."
        in table.notes
    )
    doremi = json.loads((root / "7-report/table.json").read_text())["mixtures"]["doremi"]
    assert (doremi["flops"], doremi["flops_by_reference"]) == (None, None)
    assert doremi["cost_missing"] == ["lost"]


def test_without_the_references_cost_there_are_no_ratios(root):
    (root / "2-proxy/nano-seed1/run.json").unlink()
    table = comparison_table(compared_in(root))
    assert row_of(table, "FLOPs to obtain the mixture") == ["0", "0", "unknown", "6.00e+12"]
    assert row_of(table, "FLOPs / Chameleon's") == ["-"] * 4


def test_what_a_method_wrote_down_as_its_sum_is_known(root):
    sums = {"made_from": ["lost"], "total_cost": {"flops": 7e12, "device_seconds": 9.0}}
    change(root / "4-mixture/doremi.json", parameters=sums)
    assert cost_of(compared_in(root).contestants[-1])[0] == 7e12


def test_without_chameleon_costs_have_no_ratio(root):
    table = comparison_table(compared_in(root, names=("uniform", "doremi")))
    assert not [row for row in table.summary if "by Chameleon" in row[0]]
    assert format_multiple(None) == "-"
    assert (format_multiple(0.015), format_multiple(394.0)) == ("0.01x", "394.0x")


def test_mixtures_go_by_the_names_of_the_papers():
    names = ("mixing-laws", "doremi-2k", "doge", "mine", "a-b")
    assert [mixture_label(n) for n in names] == ["Mixing laws", "DoReMi 2k", "DoGE", "mine", "a-b"]


def test_mixtures_that_are_free_stand_left_of_all_others():
    flops = np.array([0.0, 3e12, 0.0, 4e13])
    places = places_of(flops)
    assert list(places[[1, 3]]) == [3e12, 4e13]
    assert places[0] < places[2] < 3e12
    ticks = ticks_of(flops, places)
    assert [text for x, text in ticks.items() if x < 1e12] == ["none"]
    assert {"5e+12", "1e+13"} < set(ticks.values())
    assert list(ticks_of(np.zeros(2), places_of(np.zeros(2))).values()) == ["none"]


def test_mixtures_of_unknown_cost_stand_right_of_all_others():
    flops = np.array([np.nan, 0.0, 3e12, np.nan])
    places = places_of(flops)
    assert places[1] < places[2] < places[0] < places[3]
    assert [text for x, text in ticks_of(flops, places).items() if x > 6e12] == ["unknown"]
    alone = np.array([0.0, np.nan])
    assert places_of(alone)[0] < places_of(alone)[1]
