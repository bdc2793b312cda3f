"""Several run folders as one: names, copies that cost once, and corpora that do not go together."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest

from megatron_chameleon.artifacts import (
    Corpus,
    Cost,
    EvaluationResult,
    Mixture,
    TrainingRun,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.comparison import compare
from megatron_chameleon.report.downstream_tables import downstream_tables
from megatron_chameleon.report.ledger import ledger_of
from megatron_chameleon.report.merged import merge
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.downstream_samples import downstream, save
from tests.unit.report.report_samples import (
    NAMES,
    perplexity_of,
    random_mixture,
    random_weights,
    write_run_folder,
    write_sweep,
)

UNIFORM, CHAMELEON = "uniform-seed1", "chameleon-pretrain-seed1"


def change_cost(path, seconds):
    """Another artifact of the same name: it took another time."""
    body = json.loads(path.read_text())
    body["cost"]["device_seconds"] = seconds
    body.pop("checksum", None)
    path.write_text(json.dumps(body))


@pytest.fixture
def roots(tmp_path):
    """Two folders on one corpus, alike in all but where they lie."""
    first = write_run_folder(tmp_path / "run-a")
    shutil.copytree(first, tmp_path / "run-b")
    return [first, tmp_path / "run-b"]


def merged(roots):
    return merge([RunFolder.load(root) for root in roots])


def total(folder):
    return ledger_of(folder).total


def test_one_folder_gives_itself_back(roots):
    folder = RunFolder.load(roots[0])
    assert merge([folder]) is folder
    assert merge([folder, RunFolder.load(roots[0])]).merged is None


def test_what_is_copied_is_there_once_and_costs_once(roots):
    one, both = RunFolder.load(roots[0]), merged(roots)
    for field in ("proxies", "embeddings", "mixtures", "base_runs", "evaluations"):
        assert list(getattr(both, field)) == list(getattr(one, field))
    assert both.costs() == one.costs()
    assert ledger_of(both) == ledger_of(one)
    assert both.root == roots[0]


def test_names_that_collide_get_their_folders(roots):
    change_cost(roots[1] / f"5-base/{UNIFORM}/run.json", 999.0)
    both = merged(roots)
    assert list(both.base_runs) == [
        CHAMELEON,
        f"{UNIFORM} (run-a)",
        f"{UNIFORM} (run-b)",
    ]
    # The evaluations go with them, though they are equal.
    assert list(both.evaluations) == list(both.base_runs)
    costs = [both.base_runs[f"{UNIFORM} ({run})"].cost for run in ("run-a", "run-b")]
    assert [cost.device_seconds for cost in costs] == [60.0, 999.0]
    once = total(RunFolder.load(roots[0])).device_seconds
    assert total(both).device_seconds == pytest.approx(once + 999.0)


def test_the_tables_have_all_runs(roots):
    change_cost(roots[1] / f"5-base/{UNIFORM}/run.json", 999.0)
    table = perplexity_of(merged(roots))
    assert table.header[-3:] == (
        f"perplexity {UNIFORM} (run-a)",
        "perplexity Chameleon",
        f"perplexity {UNIFORM} (run-b)",
    )


def test_another_evaluation_of_the_same_run_does_not_count_the_run_twice(roots):
    path = roots[1] / f"6-evaluation/{UNIFORM}.json"
    dataclasses.replace(EvaluationResult.load(path), step=100).save(path)
    both = merged(roots)
    assert f"{UNIFORM} (run-b)" in both.base_runs
    assert both.evaluations[f"{UNIFORM} (run-b)"].step == 100
    once = total(RunFolder.load(roots[0]))
    evaluated = Cost(2e11, 3.0, 1.5, 2)
    assert total(both).device_seconds == pytest.approx((once + evaluated).device_seconds)


def test_a_linked_proxy_counts_once_wherever_it_is_named_from(roots):
    proxy = roots[1] / "2-proxy/tiny-seed1"
    shutil.rmtree(proxy)
    proxy.symlink_to(roots[0] / "2-proxy/tiny-seed1")
    for root, name in zip(roots, ("one", "two"), strict=True):
        Mixture(
            weights=dict.fromkeys(NAMES, 1 / 3),
            method="doremi",
            parameters={"made_from": ["../2-proxy/tiny-seed1"]},
            cost=Cost(1e9, 7.0, 7.0, 1),
        ).save(root / f"4-mixture/{name}.json")
    both = merged(roots)
    for folder in (both, RunFolder.load(roots[1])):
        entries = [entry for entry in ledger_of(folder).entries if "tiny-seed1" in entry]
        assert entries == ["2-proxy/tiny-seed1"]
    ledger = ledger_of(both)
    for name in ("one", "two"):
        assert list(ledger.mixtures[name].parts) == [f"4-mixture/{name}", "2-proxy/tiny-seed1"]
    once = total(RunFolder.load(roots[0])).device_seconds
    # 'one' and 'two' say the same: they are copies of one mixture.
    assert total(both).device_seconds == pytest.approx(once)


def test_a_copied_proxy_counts_once_wherever_it_is_named_from(roots):
    for root, seconds in zip(roots, (7.0, 9.0), strict=True):
        Mixture(
            weights=dict.fromkeys(NAMES, 1 / 3),
            method="doremi",
            parameters={"made_from": ["../2-proxy/tiny-seed1"]},
            cost=Cost(1e9, seconds, seconds, 1),
        ).save(root / "4-mixture/doremi.json")
    ledger = ledger_of(merged(roots))
    assert [entry for entry in ledger.entries if "tiny-seed1" in entry] == ["2-proxy/tiny-seed1"]
    for name in ("doremi (run-a)", "doremi (run-b)"):
        assert list(ledger.mixtures[name].parts) == [f"4-mixture/{name}", "2-proxy/tiny-seed1"]


def test_mixtures_of_one_name_are_read_where_they_lie(roots):
    for root, made_from in zip(roots, ("proxy-a", "proxy-b"), strict=True):
        run = TrainingRun.load(root / "2-proxy/tiny-seed1")
        seconds = 100.0 if made_from == "proxy-a" else 200.0
        dataclasses.replace(
            run, root=root / "4-mixture/doge" / made_from, cost=Cost(0.0, seconds, seconds, 1)
        ).save()
        Mixture(
            weights=dict.fromkeys(NAMES, 1 / 3),
            method="doge",
            parameters={"made_from": [f"doge/{made_from}"]},
        ).save(root / "4-mixture/doge.json")
    ledger = ledger_of(merged(roots))
    found = {name: cost.cost.device_seconds for name, cost in ledger.mixtures.items()}
    assert found["doge (run-a)"] == 100.0
    assert found["doge (run-b)"] == 200.0
    assert "4-mixture/doge/proxy-a (run-a)" in ledger.entries
    assert "4-mixture/doge/proxy-b (run-b)" in ledger.entries
    assert not any(mixture.missing for name, mixture in ledger.mixtures.items() if "doge" in name)


def test_a_store_of_another_recipe_keeps_a_place_in_its_stage(roots):
    change_cost(roots[1] / "3-embeddings/store.json", 50.0)
    both = merged(roots)
    assert list(both.embeddings) == ["3-embeddings/(run-a)", "3-embeddings/(run-b)"]
    entries = list(ledger_of(both).entries)
    assert entries.index("3-embeddings/(run-b)") < entries.index("4-mixture/chameleon-finetune")


def test_downstream_results_stay_with_their_runs(roots):
    change_cost(roots[1] / f"5-base/{UNIFORM}/run.json", 999.0)
    for root in roots:
        save(root, f"{UNIFORM}-downstream", downstream({"sciq": {0: 0.5, 1: 0.7}}))
    both = merged(roots)
    assert list(both.downstream) == [
        f"{UNIFORM} (run-a)-downstream",
        f"{UNIFORM} (run-b)-downstream",
    ]
    table = downstream_tables(both)[0]
    assert table.header[1:] == (f"{UNIFORM} (run-a)", f"{UNIFORM} (run-b)")


def test_folders_of_one_name_are_told_apart_by_their_parents(tmp_path, roots):
    for parent, root in zip(("first", "second"), roots, strict=True):
        shutil.copytree(root, tmp_path / parent / "run")
    change_cost(tmp_path / f"second/run/5-base/{UNIFORM}/run.json", 999.0)
    both = merged([tmp_path / "first/run", tmp_path / "second/run"])
    assert f"{UNIFORM} (second/run)" in both.base_runs


def test_another_corpus_is_refused_with_both_hashes(tmp_path, roots):
    other = write_run_folder(tmp_path / "run-c", ["x", "y"])
    hashes = [Corpus.load(root / "1-corpus").hash[:12] for root in (roots[0], other)]
    with pytest.raises(UserError, match="of another corpus") as refused:
        merged([roots[0], other])
    for part in (*hashes, str(roots[0] / "1-corpus"), str(other / "1-corpus"), "one corpus"):
        assert part in str(refused.value)


def test_evaluations_say_the_corpus_where_there_is_none(tmp_path, roots):
    other = write_run_folder(tmp_path / "run-c", ["x", "y"])
    shutil.rmtree(other / "1-corpus")
    with pytest.raises(UserError, match="of another corpus") as refused:
        merged([roots[0], other])
    assert str(other / f"6-evaluation/{CHAMELEON}.json") in str(refused.value)
    shutil.rmtree(roots[1] / "1-corpus")
    assert merged(reversed(roots)).corpus is not None


def test_an_evaluation_of_another_corpus_is_told_where_it_lies(roots):
    path = roots[1] / f"6-evaluation/{UNIFORM}.json"
    dataclasses.replace(EvaluationResult.load(path), corpus_hash="other").save(path)
    with pytest.raises(UserError, match="evaluated on another corpus") as refused:
        merged(roots)
    assert str(path) in str(refused.value)


def test_one_sweep_is_kept_and_two_are_refused(roots):
    rng = np.random.default_rng(0)

    def sweep(root, **changes):
        features = rng.normal(size=(len(NAMES), 4))
        mixtures = [
            random_mixture(random_weights(NAMES, rng), "pretrain", features) for _ in range(2)
        ]
        return write_sweep(root, {"ridge": mixtures}, **changes)

    sweep(roots[1])
    both = merged(roots)
    assert both.sweep is not None
    assert both.sweep.root == roots[1]
    assert "4-mixture/sweep/ridge-2 (run-b)" in ledger_of(both).entries
    sweep(roots[0], cost=Cost(1.0, 1.0, 1.0, 1))
    with pytest.raises(UserError, match="both hold a sweep"):
        merged(roots)


def test_a_merged_folder_can_be_compared_with_a_chosen_baseline(roots):
    change_cost(roots[1] / f"5-base/{UNIFORM}/run.json", 999.0)
    both = merged(roots)
    comparison = compare(both, f"{UNIFORM} (run-b)")
    assert comparison.baseline is not None
    assert comparison.baseline.run is both.base_runs[f"{UNIFORM} (run-b)"]
