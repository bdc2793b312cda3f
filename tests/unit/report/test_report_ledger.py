"""The ledger counts what a mixture was made from, and nothing twice."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_chameleon.artifacts import (
    Cost,
    EmbeddingStore,
    Mixture,
)
from megatron_chameleon.report.ledger import ledger_of
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.ledger_samples import (
    OWN,
    PROXY,
    REFERENCE,
    STORE,
    figures,
    note_of,
    write_ledger_folder,
    write_method,
    write_weights,
)
from tests.unit.report.report_samples import (
    NAMES,
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


def test_entries_stand_in_the_order_of_the_stages(root):
    entries = list(ledger_of(RunFolder.load(root)).entries)
    assert len(set(entries)) == len(entries)
    stages = [entry.partition("/")[0] for entry in entries]
    assert stages == sorted(stages)
    assert "4-mixture/doremi/reference" in entries


def test_a_path_that_leads_to_a_listed_artifact_is_that_artifact(root):
    write_method(root, "doge", ["../2-proxy/tiny-seed1", "doremi/../../2-proxy/tiny-seed1"])
    before = ledger_of(RunFolder.load(root)).entries
    (root / "4-mixture/doge.json").unlink()
    after = ledger_of(RunFolder.load(root)).entries
    assert set(before) - set(after) == {"4-mixture/doge"}


def test_a_folder_of_runs_counts_all_of_them(root):
    runs = root / "4-mixture/many/members"
    uniform = Mixture.uniform(NAMES).weights
    for number in range(3):
        cost = Cost(1e12, 2.0, 1.0, 2)
        write_training_run(runs / f"{number:03}", uniform, "manual", cost=cost)
    write_method(root, "many", ["many"])
    mixture = ledger_of(RunFolder.load(root)).mixtures["many"]
    assert figures(mixture.cost) == (3e12, 7.5, 4.5)


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


def test_what_is_gone_is_told_and_the_recorded_sum_is_shown(root):
    total = {"flops": 9e13, "device_seconds": 400.0}
    write_method(root, "gone", ["gone/proxy", "doremi/proxy"], total_cost=total)
    mixture = ledger_of(RunFolder.load(root)).mixtures["gone"]
    assert mixture.missing == ("gone/proxy",)
    assert (mixture.cost.flops, mixture.cost.device_seconds) == (9e13, 400.0)
    assert note_of(root, "gone") == (
        "Not found for gone, and not counted: gone/proxy; the sum that its file says is shown."
    )
    write_method(root, "gone", ["gone/proxy", "doremi/proxy"])
    assert ledger_of(RunFolder.load(root)).mixtures["gone"].cost.flops == 7e12
    assert note_of(root, "gone").endswith("not counted: gone/proxy.")


@pytest.mark.parametrize("cause", ["no run", "no weights", "other weights"])
def test_a_proxy_that_is_not_there_is_told(root, cause):
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
        write_weights(run, b"trained anew")
    mixture = ledger_of(RunFolder.load(root)).mixtures["chameleon-pretrain"]
    assert mixture.missing == ("the training of its model, which is not in 2-proxy",)
    assert mixture.cost.flops == 4e11
    assert mixture.missing[0] in note_of(root, "chameleon-pretrain")


def test_embeddings_of_another_recipe_are_not_taken_for_the_mixtures(root):
    store = EmbeddingStore.load(root / "3-embeddings")
    recipe = dataclasses.replace(store.recipe, num_windows=store.recipe.num_windows + 1)
    dataclasses.replace(store, recipe=recipe).save()
    mixture = ledger_of(RunFolder.load(root)).mixtures["chameleon-pretrain"]
    assert mixture.missing == ("its embeddings, which are not in 3-embeddings",)
