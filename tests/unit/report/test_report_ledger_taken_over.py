"""A mixture that was taken over from another brings its costs."""

from __future__ import annotations

import pytest

from megatron_chameleon.artifacts import (
    Mixture,
)
from megatron_chameleon.methods.manual import ManualOptions
from megatron_chameleon.methods.manual import compute as compute_manual
from megatron_chameleon.report.ledger import ledger_of
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.ledger_samples import (
    DOREMI_PROXY,
    OWN,
    REFERENCE,
    figures,
    write_ledger_folder,
    write_method,
)
from tests.unit.report.report_samples import write_run_folder


@pytest.fixture
def root(tmp_path):
    return write_ledger_folder(tmp_path / "run")


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


def test_what_lacks_of_a_mixture_taken_over_is_named_once(root, corpus_root):
    take_over(root, "doremi", "taken", corpus_root)
    (root / "4-mixture/doremi/proxy").rename(root / "gone")
    found = ledger_of(RunFolder.load(root)).mixtures["taken"]
    assert found.missing == ("doremi/proxy",)


def test_a_cost_that_nobody_knows_goes_with_a_mixture_taken_over(root, corpus_root):
    write_method(root, "regmix", [], unknown_costs=["the runs of ratios.csv"])
    take_over(root, "regmix", "taken", corpus_root)
    mixtures = ledger_of(RunFolder.load(root)).mixtures
    for name in ("regmix", "taken"):
        assert mixtures[name].missing == ("the runs of ratios.csv",)
        assert mixtures[name].parts["4-mixture/regmix"] == OWN


def test_mixtures_that_were_written_over_each_other_in_turn_are_counted_once(root):
    write_method(root, "doremi", ["doremi-again.json", "doremi/proxy"])
    write_method(root, "doremi-again", ["doremi.json", "doremi/reference"])
    mixtures = ledger_of(RunFolder.load(root)).mixtures
    expected = {"4-mixture/doremi": OWN, "4-mixture/doremi-again": OWN}
    expected |= {"4-mixture/doremi/proxy": DOREMI_PROXY, "4-mixture/doremi/reference": REFERENCE}
    assert mixtures["doremi"].parts == mixtures["doremi-again"].parts == expected
