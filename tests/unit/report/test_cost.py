"""The ledger counts what a mixture was made from, and nothing twice."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_chameleon.artifacts import Cost, Mixture
from megatron_chameleon.artifacts.swarm import MemberRecord, SwarmRecord
from megatron_chameleon.methods.manual.compute import compute_manual
from megatron_chameleon.methods.manual.options import ManualOptions
from megatron_chameleon.report.cost import cost_tables, ledger_of, mixture_cost_table
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.ledger_samples import (
    DOREMI_PROXY,
    OWN,
    PROXY,
    REFERENCE,
    STORE,
    edit_mixture,
    figures,
    note_of,
    write_ledger_folder,
    write_method,
    write_weights,
)
from tests.unit.report.report_samples import (
    NAMES,
    PROVENANCE,
    rows_of,
    write_run_folder,
    write_sweep,
    write_training_run,
)


@pytest.fixture
def root(tmp_path):
    return write_ledger_folder(tmp_path / "run")


def test_chameleon_costs_its_proxy_its_embeddings_and_its_algebra(root):
    ledger = ledger_of(RunFolder.load(root))
    for name in ("chameleon-pretrain", "chameleon-finetune"):
        mixture = ledger.mixtures[name]
        assert mixture.parts == {
            f"4-mixture/{name}": OWN,
            "2-proxy/tiny-seed1": PROXY,
            "3-embeddings": STORE,
        }
        assert mixture.missing == ()
        assert figures(mixture.cost) == (3.4e12, 22.5, 12.0)
    assert ledger.reference == "chameleon-pretrain"


def test_a_run_that_two_mixtures_share_is_the_cost_of_each_and_once_in_the_total(root):
    ledger = ledger_of(RunFolder.load(root))
    assert ledger.mixtures["doremi"].cost.flops == 12e12
    assert ledger.mixtures["doremi"].cost.device_seconds == 81.5
    assert ledger.mixtures["doremi-again"].cost.flops == 5e12
    assert ledger.mixtures["uniform"].cost == Cost()
    # corpus, proxy, store, mixtures, reference and proxy of DoReMi, two base runs, two evaluations
    assert ledger.total.flops == pytest.approx(3e12 + 4e11 + 12e12 + 2 * 1.25e13 + 2 * 2e11)
    seconds = 4.5 + 16 + 5 + 4 * 1.5 + 80 + 2 * 60 + 2 * 3
    assert ledger.total.device_seconds == pytest.approx(seconds)


def test_a_run_outside_of_the_folder_is_counted_under_its_path(root, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    write_training_run(elsewhere, Mixture.uniform(NAMES).weights, "uniform", cost=REFERENCE)
    write_method(root, "doge", ["../../elsewhere"])
    ledger = ledger_of(RunFolder.load(root))
    assert ledger.mixtures["doge"].parts[elsewhere.as_posix()] == REFERENCE
    assert list(ledger.entries)[-1] == elsewhere.as_posix()


def test_mixtures_of_a_sweep_are_in_the_total(root):
    mixture = dataclasses.replace(Mixture.uniform(NAMES), cost=OWN)
    before = ledger_of(RunFolder.load(root)).total.device_seconds
    write_sweep(root, {"ridge": [mixture] * 3})
    ledger = ledger_of(RunFolder.load(root))
    assert ledger.total.device_seconds == pytest.approx(before + 3 * 1.5)
    assert "sweep/ridge-2" not in ledger.mixtures


def test_what_is_gone_is_reported_and_the_recorded_sum_is_shown(root):
    total = {"flops": 9e13, "device_seconds": 400.0}
    write_method(root, "gone", ["gone/proxy", "doremi/proxy"], total_cost=total)
    mixture = ledger_of(RunFolder.load(root)).mixtures["gone"]
    assert mixture.missing == ("gone/proxy",)
    assert (mixture.cost.flops, mixture.cost.device_seconds) == (9e13, 400.0)
    assert "not counted: gone/proxy; the total" in note_of(root, "gone")
    write_method(root, "gone", ["gone/proxy", "doremi/proxy"])
    assert ledger_of(RunFolder.load(root)).mixtures["gone"].cost.flops == 7e12
    assert note_of(root, "gone").endswith("not counted: gone/proxy.")


@pytest.mark.parametrize("cause", ["no run", "no weights", "other weights"])
def test_a_proxy_that_is_not_there_is_reported(root, cause):
    run = root / "2-proxy/tiny-seed1"
    weights = run / "checkpoints/step-00000200/__0_0.distcp"
    if cause == "no run":
        (run / "run.json").unlink()
    elif cause == "no weights":
        weights.unlink()
    else:
        for path in weights.parent.iterdir():
            path.unlink()
        weights.parent.rmdir()
        write_weights(run, b"retrained")
    mixture = ledger_of(RunFolder.load(root)).mixtures["chameleon-pretrain"]
    assert mixture.missing == ("the training of its model, which is not in 2-proxy",)
    assert mixture.cost.flops == 4e11
    assert mixture.missing[0] in note_of(root, "chameleon-pretrain")


def total(root):
    return ledger_of(RunFolder.load(root)).total.device_seconds


def test_a_linked_proxy_counts_once_and_under_its_own_name(root):
    folder = RunFolder.load(root)
    before, costs = ledger_of(folder), folder.costs()
    for link in ("2-proxy/latest", "2-proxy/zzz", "5-base/proxy"):
        (root / link).symlink_to(root / "2-proxy/tiny-seed1", target_is_directory=True)
    folder = RunFolder.load(root)
    assert {"latest", "zzz"} <= set(folder.proxies)
    assert folder.costs() == costs
    after = ledger_of(folder)
    assert after.entries == before.entries
    # Those made from the proxy, which is found by its weights, paid for the same one.
    assert after.mixtures == before.mixtures


def test_linked_results_mixtures_and_stores_count_once(root):
    before = total(root)
    for link, goal in (
        ("4-mixture/best.json", "chameleon-pretrain.json"),
        ("6-evaluation/again.json", "uniform-seed1.json"),
    ):
        (root / link).symlink_to(goal)
    (root / "4-mixture/best.embeddings").symlink_to(root / "3-embeddings")
    write_method(root, "doge", ["best.json"])
    ledger = ledger_of(RunFolder.load(root))
    assert total(root) == pytest.approx(before + OWN.device_seconds)
    assert "4-mixture/chameleon-pretrain" in ledger.mixtures["doge"].parts
    assert ledger.mixtures["best"].cost == ledger.mixtures["chameleon-pretrain"].cost


def take_over(root, source, name, corpus_root, output=None):
    """Give the weights of a mixture to --method manual; where it wrote them."""
    output = output or root / f"4-mixture/{name}.json"
    weights = str(root / f"4-mixture/{source}.json")
    compute_manual(ManualOptions(corpus=corpus_root, output=output, weights=weights))
    return output


@pytest.mark.parametrize("source", ["doremi", "chameleon-pretrain", "uniform"])
def test_a_mixture_that_was_taken_over_costs_what_it_did_under_its_old_name(
    root, corpus_root, source
):
    before = ledger_of(RunFolder.load(root))
    taken = Mixture.load(take_over(root, source, "taken", corpus_root))
    take_over(root, "taken", "again", corpus_root)
    ledger = ledger_of(RunFolder.load(root))
    old = ledger.mixtures[source]
    assert ledger.mixtures["taken"].parts == {"4-mixture/taken": taken.cost, **old.parts}
    assert ledger.mixtures["taken"].missing == ()
    again = Mixture.load(root / "4-mixture/again.json")
    assert ledger.mixtures["again"].parts == {
        "4-mixture/again": again.cost,
        "4-mixture/taken": taken.cost,
        **old.parts,
    }
    assert figures(ledger.total) == pytest.approx(
        figures(before.total + taken.cost + again.cost)
    )  # nothing is there twice


def test_a_mixture_taken_over_from_another_run_brings_its_runs(root, corpus_root, tmp_path):
    """Their cost is found where they are, and the recorded sum where the run has gone."""
    recorded = REFERENCE + DOREMI_PROXY + OWN
    total = {"flops": recorded.flops, "device_seconds": recorded.device_seconds}
    write_method(root, "doremi", ["doremi/reference", "doremi/proxy"], total_cost=total)
    other = write_run_folder(tmp_path / "other")
    taken = Mixture.load(
        take_over(root, "doremi", "taken", corpus_root, other / "4-mixture/taken.json")
    )
    found = ledger_of(RunFolder.load(other)).mixtures["taken"]
    assert figures(found.cost) == pytest.approx(figures(recorded + taken.cost))
    root.rename(tmp_path / "elsewhere")
    gone = ledger_of(RunFolder.load(other)).mixtures["taken"]
    assert gone.missing[0].endswith("4-mixture/doremi.json")
    assert len(gone.missing) == 3
    assert gone.cost.flops == recorded.flops
    assert gone.cost.device_seconds == pytest.approx(found.cost.device_seconds)


def test_mixtures_that_were_written_over_each_other_in_turn_are_counted_once(root):
    write_method(root, "doremi", ["doremi-again.json", "doremi/proxy"])
    write_method(root, "doremi-again", ["doremi.json", "doremi/reference"])
    mixtures = ledger_of(RunFolder.load(root)).mixtures
    expected = {"4-mixture/doremi": OWN, "4-mixture/doremi-again": OWN}
    expected |= {"4-mixture/doremi/proxy": DOREMI_PROXY, "4-mixture/doremi/reference": REFERENCE}
    assert mixtures["doremi"].parts == mixtures["doremi-again"].parts == expected


def test_the_cost_table_adds_up(root):
    table = cost_tables(RunFolder.load(root))[-1]
    found = rows_of(table)
    assert found["1-corpus"] == ["-", "4.5", "4.5", "1"]
    assert found["2-proxy/tiny-seed1"] == ["3.00e+12", "8.0", "16.0", "2"]
    assert found["4-mixture/doremi/proxy"] == ["7.00e+12", "25.0", "50.0", "2"]
    for column in (1, 2):
        *parts, total = (float(cells[column]) for cells in found.values() if cells[column] != "-")
        assert total == pytest.approx(sum(parts))
    assert found["total"][0] == "4.08e+13"


def test_each_mixture_has_its_cost_in_hours_and_as_a_ratio(root):
    edit_mixture(root, "doremi", parameters={"made_from": ["doremi"], "paper_flops": 1.34e18})
    folder = RunFolder.load(root)
    table = mixture_cost_table(ledger_of(folder), folder)
    assert table.header == (
        "mixture",
        "FLOPs",
        "device-hours",
        "FLOPs / chameleon-pretrain",
        "device-hours / chameleon-pretrain",
        "FLOPs as the paper counts",
    )
    found = rows_of(table)
    assert found["chameleon-pretrain"] == ["3.40e+12", "0.00625", "1.0x", "1.0x", "-"]
    assert found["doremi"] == ["1.20e+13", "0.0226", "3.5x", "3.6x", "1.34e+18"]
    assert found["uniform"] == ["-", "-", "-", "-", "-"]
    base = "Training 5-base/chameleon-pretrain-seed1 took 1.25e+13 FLOPs and 0.0167 device-hours."
    assert base in table.notes


def test_a_swarm_of_two_mixtures_is_the_cost_of_each_and_once_in_the_total(root):
    before = ledger_of(RunFolder.load(root)).total
    work = root / "4-mixture/regmix/swarm"
    SwarmRecord(work, {}, "0", NAMES, [[0.5, 0.3, 0.2]] * 3, PROVENANCE).save()
    for number in range(3):
        MemberRecord(number, [1], [[1.0, 2.0, 3.0]], cost=Cost(1e12, 2.0, 1.0, 2)).save(work)
    for name in ("regmix-code", "regmix-prose"):
        write_method(root, name, ["regmix"])
    ledger = ledger_of(RunFolder.load(root))
    assert figures(ledger.entries["4-mixture/regmix/swarm"]) == (3e12, 6.0, 3.0)
    for name in ("regmix-code", "regmix-prose"):
        assert ledger.mixtures[name].cost.flops == 3e12
    assert ledger.total.flops == pytest.approx(before.flops + 3e12)


def test_a_mixture_with_a_part_of_unknown_cost_has_no_ratio(root):
    write_method(root, "regmix", [], unknown_costs=["the runs of ratios.csv"])
    write_method(root, "copy", ["regmix.json"])
    folder = RunFolder.load(root)
    table = mixture_cost_table(ledger_of(folder), folder)
    for name in ("regmix", "copy"):
        assert rows_of(table)[name] == ["unknown", "unknown", "-", "-"]
        assert note_of(root, name).endswith("not counted: the runs of ratios.csv.")
