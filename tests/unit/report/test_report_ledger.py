"""The ledger counts what a mixture was made from, and nothing twice."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Cost,
    EmbeddingStore,
    Mixture,
    TrainingRun,
)
from megatron_chameleon.artifacts.checkpoint import hash_files
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns, write_mixture_runs
from megatron_chameleon.methods.fits.regmix import compute_regmix
from megatron_chameleon.methods.manual import ManualOptions
from megatron_chameleon.methods.manual import compute as compute_manual
from megatron_chameleon.methods.regmix import RegmixOptions, TreeOptions
from megatron_chameleon.options.fits import DrawOptions
from megatron_chameleon.options.swarm import SwarmOptions
from megatron_chameleon.report.cost_tables import (
    cost_table,
    format_hours,
    format_ratio,
    mixture_cost_table,
)
from megatron_chameleon.report.ledger import ledger_of
from megatron_chameleon.report.page import make_report
from megatron_chameleon.report.run_folder import RunFolder
from tests.small_corpus import write_small_corpus
from tests.unit.report.report_samples import (
    NAMES,
    PROVENANCE,
    write_run_folder,
    write_sweep,
    write_training_run,
)

PROXY = Cost(3e12, 16.0, 8.0, 2)
STORE = Cost(4e11, 5.0, 2.5, 2)
OWN = Cost(0.0, 1.5, 1.5, 1)
REFERENCE, DOREMI_PROXY = Cost(5e12, 30.0, 15.0, 2), Cost(7e12, 50.0, 25.0, 2)


def write_weights(run_dir, content):
    """A checkpoint of one file in a run's folder; its hash."""
    folder = run_dir / "checkpoints/step-00000200"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(content)
    record = CheckpointRecord(
        root=folder,
        model={},
        step=200,
        samples=0,
        domain_samples={},
        mixture_phases=[],
        domain_tokens={},
        tokenizer_hash="",
        corpus_hash="",
        mixture_hash="",
        layout={},
        files=hash_files(folder),
        provenance=PROVENANCE,
    )
    record.save()
    run = TrainingRun.load(run_dir)
    dataclasses.replace(run, checkpoints=["checkpoints/step-00000200"]).save()
    return record.hash


def edit_mixture(root, name, **changes):
    path = root / f"4-mixture/{name}.json"
    dataclasses.replace(Mixture.load(path), **changes).save(path)


@pytest.fixture
def root(tmp_path):
    """Two Chameleon mixtures of one proxy and one store, and two that share a reference run."""
    root = write_run_folder(tmp_path / "run")
    model = write_weights(root / "2-proxy/tiny-seed1", b"proxy")
    store = EmbeddingStore.load(root / "3-embeddings")
    store = dataclasses.replace(store, recipe=dataclasses.replace(store.recipe, model_hash=model))
    store.save()
    made = dataclasses.replace(PROVENANCE, inputs={"corpus": "0", "checkpoint": model})
    for mode in ("pretrain", "finetune"):
        parameters = {"mode": mode, "embedding": dataclasses.asdict(store.recipe)}
        edit_mixture(root, f"chameleon-{mode}", parameters=parameters, provenance=made)
    work = root / "4-mixture/doremi"
    uniform = Mixture.uniform(NAMES).weights
    for name, cost in (("reference", REFERENCE), ("proxy", DOREMI_PROXY)):
        write_training_run(work / name, uniform, "uniform", cost=cost)
    write_method(root, "doremi", ["doremi/reference", "doremi/proxy"])
    write_method(root, "doremi-again", ["doremi/reference"])
    Mixture(uniform, method="uniform").save(root / "4-mixture/uniform.json")
    return root


def write_method(root, name, made_from, **parameters):
    weights = Mixture.uniform(NAMES).weights
    parameters["made_from"] = made_from
    mixture = Mixture(weights, method="doremi", parameters=parameters, cost=OWN)
    mixture.save(root / f"4-mixture/{name}.json")


def figures(cost):
    return (cost.flops, cost.device_seconds, cost.wall_seconds)


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


SMALL_SWARM = {
    "num_proxies": 8,
    "draws": DrawOptions(smallest_weight=0.05),
    "swarm": SwarmOptions(
        model_size="nano",
        train_iters=2,
        lr_warmup_iters=1,
        seq_length=32,
        global_batch_size=2,
        eval_tokens=64,
    ),
}


def compute_by_regmix(root, corpus, name, **changes):
    trees = TreeOptions(num_trees=20, num_draws=500, num_best=10)
    output = root / f"4-mixture/{name}.json"
    compute_regmix(RegmixOptions(corpus=corpus, output=output, trees=trees, **changes))


@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_a_swarm_of_two_targets_is_the_cost_of_each_and_once_in_the_total(root, corpus):
    before = ledger_of(RunFolder.load(root)).total
    work = root / "4-mixture/regmix"
    for target in NAMES[:2]:
        compute_by_regmix(
            root, corpus, f"regmix-{target}", work_dir=work, target=target, **SMALL_SWARM
        )
    ledger = ledger_of(RunFolder.load(root))
    swarm = ledger.entries["4-mixture/regmix/swarm"]
    members = [json.loads(path.read_text()) for path in (work / "swarm/members").iterdir()]
    assert len(members) == 8
    assert swarm.flops > 0
    assert swarm.flops == pytest.approx(sum(member["cost"]["flops"] for member in members))
    own = 0.0
    for target in NAMES[:2]:
        paid = ledger.mixtures[f"regmix-{target}"]
        assert paid.parts["4-mixture/regmix/swarm"] == swarm
        assert paid.cost.flops == swarm.flops
        total = paid.mixture.parameters["total_cost"]
        assert total == {
            "flops": pytest.approx(paid.cost.flops),
            "device_seconds": pytest.approx(paid.cost.device_seconds),
        }
        own += paid.mixture.cost.device_seconds
    assert ledger.total.flops == pytest.approx(before.flops + swarm.flops)
    seconds = before.device_seconds + swarm.device_seconds + own
    assert ledger.total.device_seconds == pytest.approx(seconds)


@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_a_mixture_of_a_persons_tables_has_an_unknown_cost_and_no_ratio(root, corpus, tmp_path):
    mixtures = np.random.default_rng(0).dirichlet(np.ones(len(NAMES)), 20)
    keys, names = [str(number) for number in range(20)], list(NAMES)
    tables = {"ratios": tmp_path / "ratios.csv", "metrics": tmp_path / "metrics.csv"}
    write_mixture_runs(MixtureRuns(keys, names, mixtures, names, 2 + mixtures), **tables)
    compute_by_regmix(root, corpus, "regmix", **tables)
    mixture = Mixture.load(root / "4-mixture/regmix.json")
    path = root / "4-mixture/copy.json"
    dataclasses.replace(mixture, parameters={"made_from": ["regmix.json"]}).save(path)
    folder = RunFolder.load(root)
    table = mixture_cost_table(ledger_of(folder), folder)
    for name in ("regmix", "copy"):
        assert cells_of(table)[name] == ["unknown", "unknown", "-", "-"]
        assert note_of(root, name).endswith(f"not counted: the runs of {tables['ratios']}.")


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


def note_of(root, name):
    folder = RunFolder.load(root)
    table = mixture_cost_table(ledger_of(folder), folder)
    return next((note for note in table.notes if note.startswith(f"Not found for {name},")), "")


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
    weights = run / "checkpoints/step-00000200/weights.bin"
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


def take_over(root, source, name, corpus, output=None):
    """Give the weights of a mixture to --method manual; where it wrote them."""
    output = output or root / f"4-mixture/{name}.json"
    weights = str(root / f"4-mixture/{source}.json")
    compute_manual(ManualOptions(corpus=corpus, output=output, weights=weights))
    return output


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_small_corpus(tmp_path_factory.mktemp("corpus"), NAMES).root


@pytest.mark.parametrize("source", ["doremi", "chameleon-pretrain", "uniform"])
def test_a_mixture_that_was_taken_over_costs_what_it_did_under_its_old_name(root, corpus, source):
    before = ledger_of(RunFolder.load(root))
    taken = Mixture.load(take_over(root, source, "taken", corpus))
    take_over(root, "taken", "again", corpus)
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


def test_a_mixture_taken_over_from_another_run_brings_its_runs(root, corpus, tmp_path):
    """Their cost is found where they are, and the recorded sum where the run has gone."""
    recorded = REFERENCE + DOREMI_PROXY + OWN
    total = {"flops": recorded.flops, "device_seconds": recorded.device_seconds}
    write_method(root, "doremi", ["doremi/reference", "doremi/proxy"], total_cost=total)
    other = write_run_folder(tmp_path / "other")
    taken = Mixture.load(take_over(root, "doremi", "taken", corpus, other / "4-mixture/taken.json"))
    found = ledger_of(RunFolder.load(other)).mixtures["taken"]
    assert figures(found.cost) == pytest.approx(figures(recorded + taken.cost))
    root.rename(tmp_path / "elsewhere")
    gone = ledger_of(RunFolder.load(other)).mixtures["taken"]
    assert gone.missing[0].endswith("4-mixture/doremi.json")
    assert len(gone.missing) == 3
    assert gone.cost.flops == recorded.flops
    assert gone.cost.device_seconds == pytest.approx(found.cost.device_seconds)


def test_what_lacks_of_a_mixture_taken_over_is_named_once(root, corpus):
    take_over(root, "doremi", "taken", corpus)
    (root / "4-mixture/doremi/proxy").rename(root / "gone")
    found = ledger_of(RunFolder.load(root)).mixtures["taken"]
    assert found.missing == ("doremi/proxy",)


def test_a_cost_that_nobody_knows_goes_with_a_mixture_taken_over(root, corpus):
    write_method(root, "regmix", [], unknown_costs=["the runs of ratios.csv"])
    take_over(root, "regmix", "taken", corpus)
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


def cells_of(table):
    return {row[0].text: [cell.text for cell in row[1:]] for row in (*table.rows, *table.summary)}


def test_the_cost_table_adds_up(root):
    table = cost_table(ledger_of(RunFolder.load(root)))
    found = cells_of(table)
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
    found = cells_of(table)
    assert found["chameleon-pretrain"] == ["3.40e+12", "0.00625", "1.0x", "1.0x", "-"]
    assert found["doremi"] == ["1.20e+13", "0.0226", "3.5x", "3.6x", "1.34e+18"]
    assert found["uniform"] == ["-", "-", "-", "-", "-"]
    base = "Training 5-base/chameleon-pretrain-seed1 took 1.25e+13 FLOPs and 0.0167 device-hours."
    assert base in table.notes


def test_without_chameleon_there_are_no_ratios(root):
    for mode in ("pretrain", "finetune"):
        (root / f"4-mixture/chameleon-{mode}.json").unlink()
    folder = RunFolder.load(root)
    table = mixture_cost_table(ledger_of(folder), folder)
    assert table.header == ("mixture", "FLOPs", "device-hours")


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.0, "-"), (3600.0, "1"), (36.0, "0.01"), (4_440_000.0, "1,233")]
)
def test_hours_have_three_digits(seconds, told):
    assert format_hours(seconds) == told


@pytest.mark.parametrize(
    ("cost", "told"), [(0.0, "-"), (11.63, "5.8x"), (0.5, "0.25x"), (2.0, "1.0x")]
)
def test_a_ratio_of_nothing_is_none(cost, told):
    assert format_ratio(cost, 2.0) == told
    assert format_ratio(1.0, 0.0) == "-"


def test_the_report_shows_the_ledger(root, capsys):
    make_report(root)
    printed = capsys.readouterr().out
    assert "Cost to obtain each mixture" in printed
    assert "4-mixture/doremi/reference" in printed
