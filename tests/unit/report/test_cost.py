"""The cost ledger: the costs of a mixture's inputs are added, and each artifact counts once."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_chameleon.artifacts import Cost, EmbeddingStore, Mixture, TrainingRun
from megatron_chameleon.artifacts.swarm import MemberRecord, SwarmRecord, member_path
from megatron_chameleon.report.cost import ledger_of, mixture_cost_table
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.samples import (
    NAMES,
    PROVENANCE,
    edit,
    rows_of,
    write_checkpoint,
    write_run_folder,
    write_training_run,
)

OWN = Cost(0.0, 1.5, 1.5, 1)
REFERENCE, DOREMI_PROXY = Cost(5e12, 30.0, 15.0, 2), Cost(7e12, 50.0, 25.0, 2)


def write_method(root, name, made_from, **parameters):
    weights = Mixture.uniform(NAMES).weights
    parameters["made_from"] = made_from
    mixture = Mixture(weights, method="doremi", parameters=parameters, cost=OWN)
    mixture.save(root / f"4-mixture/{name}.json")


@pytest.fixture
def root(tmp_path):
    """Two Chameleon mixtures of one proxy and store, and two mixtures that share a run."""
    root = write_run_folder(tmp_path / "run")
    proxy = TrainingRun.load(root / "2-proxy/tiny-seed1")
    dataclasses.replace(proxy, checkpoints=["checkpoints/step-00000200"]).save()
    model = write_checkpoint(proxy.root / "checkpoints/step-00000200", b"proxy")
    store = EmbeddingStore.load(root / "3-embeddings")
    store = dataclasses.replace(store, recipe=dataclasses.replace(store.recipe, model_hash=model))
    store.save()
    made = dataclasses.replace(PROVENANCE, inputs={"corpus": "0", "checkpoint": model})
    for mode in ("pretrain", "finetune"):
        parameters = {"mode": mode, "embedding": dataclasses.asdict(store.recipe)}
        edit(root / f"4-mixture/chameleon-{mode}.json", parameters=parameters, provenance=made)
    work = root / "4-mixture/doremi"
    uniform = Mixture.uniform(NAMES).weights
    for name, cost in (("reference", REFERENCE), ("proxy", DOREMI_PROXY)):
        write_training_run(work / name, uniform, "uniform", cost=cost)
    write_method(root, "doremi", ["doremi/reference", "doremi/proxy"])
    write_method(root, "doremi-again", ["doremi/reference"])
    Mixture(uniform, method="uniform").save(root / "4-mixture/uniform.json")
    return root


def test_a_shared_run_counts_for_each_mixture_and_once_in_the_total(root):
    ledger = ledger_of(RunFolder.load(root))
    assert ledger.mixtures["doremi"].cost.flops == 12e12
    assert ledger.mixtures["doremi"].cost.device_seconds == 81.5
    assert ledger.mixtures["doremi-again"].cost.flops == 5e12
    assert ledger.mixtures["uniform"].cost == Cost()
    # corpus, proxy, store, mixtures, reference and proxy of DoReMi, two base runs, two evaluations
    assert ledger.total.flops == pytest.approx(3e12 + 4e11 + 12e12 + 2 * 1.25e13 + 2 * 2e11)
    seconds = 4.5 + 16 + 5 + 4 * 1.5 + 80 + 2 * 60 + 2 * 3
    assert ledger.total.device_seconds == pytest.approx(seconds)


def test_missing_input_is_reported_and_the_recorded_sum_is_shown(root):
    total = {"flops": 9e13, "device_seconds": 400.0}
    write_method(root, "gone", ["gone/proxy", "doremi/proxy"], total_cost=total)
    mixture = ledger_of(RunFolder.load(root)).mixtures["gone"]
    assert mixture.missing == ("gone/proxy",)
    assert (mixture.cost.flops, mixture.cost.device_seconds) == (9e13, 400.0)
    write_method(root, "gone", ["gone/proxy", "doremi/proxy"])
    (root / "2-proxy/tiny-seed1/checkpoints/step-00000200/__0_0.distcp").unlink()
    mixtures = ledger_of(RunFolder.load(root)).mixtures
    assert mixtures["gone"].cost.flops == 7e12
    chameleon = mixtures["chameleon-pretrain"]
    assert chameleon.missing == ("the training of its model, which is not in 2-proxy",)
    assert chameleon.cost.flops == 4e11


def test_a_linked_proxy_is_counted_once_under_its_original_name(root):
    folder = RunFolder.load(root)
    before, costs = ledger_of(folder), folder.costs()
    for link in ("2-proxy/latest", "2-proxy/zzz", "5-base/proxy"):
        (root / link).symlink_to(root / "2-proxy/tiny-seed1", target_is_directory=True)
    folder = RunFolder.load(root)
    assert {"latest", "zzz"} <= set(folder.proxies)
    assert folder.costs() == costs
    after = ledger_of(folder)
    assert after.entries == before.entries
    # The proxy of a mixture is found by the hash of its weights.
    assert after.mixtures == before.mixtures


def test_mixtures_made_from_each_other_are_counted_once(root):
    write_method(root, "doremi", ["doremi-again.json", "doremi/proxy"])
    write_method(root, "doremi-again", ["doremi.json", "doremi/reference"])
    mixtures = ledger_of(RunFolder.load(root)).mixtures
    expected = {"4-mixture/doremi": OWN, "4-mixture/doremi-again": OWN}
    expected |= {"4-mixture/doremi/proxy": DOREMI_PROXY, "4-mixture/doremi/reference": REFERENCE}
    assert mixtures["doremi"].parts == mixtures["doremi-again"].parts == expected


def test_each_mixture_has_its_cost_in_hours_and_as_a_ratio(root):
    parameters = {"made_from": ["doremi"], "paper_flops": 1.34e18}
    edit(root / "4-mixture/doremi.json", parameters=parameters)
    folder = RunFolder.load(root)
    table = mixture_cost_table(ledger_of(folder), folder)
    found = rows_of(table)
    assert found["chameleon-pretrain"] == ["3.40e+12", "0.00625", "1.0x", "1.0x", "-"]
    assert found["doremi"] == ["1.20e+13", "0.0226", "3.5x", "3.6x", "1.34e+18"]
    assert found["uniform"] == ["-", "-", "-", "-", "-"]


def test_a_shared_swarm_counts_for_each_mixture_and_once_in_the_total(root):
    before = ledger_of(RunFolder.load(root)).total
    work = root / "4-mixture/regmix/swarm"
    SwarmRecord(work, {}, "0", NAMES, [[0.5, 0.3, 0.2]] * 3, PROVENANCE).save()
    for number in range(3):
        MemberRecord(number, [1], [[1.0, 2.0, 3.0]], cost=Cost(1e12, 2.0, 1.0, 2)).save(
            member_path(work, number)
        )
    for name in ("regmix-code", "regmix-prose"):
        write_method(root, name, ["regmix"])
    ledger = ledger_of(RunFolder.load(root))
    swarm = ledger.entries["4-mixture/regmix/swarm"]
    assert (swarm.flops, swarm.device_seconds, swarm.wall_seconds) == (3e12, 6.0, 3.0)
    for name in ("regmix-code", "regmix-prose"):
        assert ledger.mixtures[name].cost.flops == 3e12
    assert ledger.total.flops == pytest.approx(before.flops + 3e12)
