"""Which artifacts a run folder has, several folders as one, and only one corpus in them."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest

from megatron_chameleon.artifacts import Corpus, Cost, EvaluationResult, Mixture, TrainingRun
from megatron_chameleon.artifacts.downstream_result import DownstreamProtocol, DownstreamResult
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.comparison import compare
from megatron_chameleon.report.cost import ledger_of
from megatron_chameleon.report.downstream import downstream_tables
from megatron_chameleon.report.perplexity import bits_per_byte_table, loss_table
from megatron_chameleon.report.run_folder import RunFolder, merge
from tests.unit.report.downstream_samples import downstream, save
from tests.unit.report.report_samples import (
    NAMES,
    PROVENANCE,
    perplexity_of,
    random_mixture,
    random_weights,
    write_corpus,
    write_run_folder,
    write_sweep,
    write_training_run,
)

UNIFORM, CHAMELEON = RUNS = ("uniform-seed1", "chameleon-pretrain-seed1")


def test_every_stage_is_collected_under_its_name(tmp_path):
    folder = RunFolder.load(write_run_folder(tmp_path / "run"))
    assert folder.corpus is not None
    assert folder.corpus.names == NAMES
    assert list(folder.proxies) == ["tiny-seed1"]
    assert list(folder.embeddings) == ["3-embeddings"]
    assert list(folder.mixtures) == ["chameleon-finetune", "chameleon-pretrain"]
    assert list(folder.base_runs) == ["chameleon-pretrain-seed1", "uniform-seed1"]
    assert list(folder.evaluations) == list(folder.base_runs)
    assert folder.sweep is None


def test_costs_are_listed_in_the_order_of_the_stages(tmp_path):
    costs = RunFolder.load(write_run_folder(tmp_path / "run")).costs()
    assert list(costs) == [
        "1-corpus",
        "2-proxy/tiny-seed1",
        "3-embeddings",
        "4-mixture/chameleon-finetune",
        "4-mixture/chameleon-pretrain",
        "5-base/chameleon-pretrain-seed1",
        "5-base/uniform-seed1",
        "6-evaluation/chameleon-pretrain-seed1",
        "6-evaluation/uniform-seed1",
    ]
    assert costs["2-proxy/tiny-seed1"] == Cost(3e12, 16.0, 8.0, 2)


@pytest.mark.parametrize("place", ["3-embeddings/layer-2", "4-mixture/embeddings"])
def test_a_store_may_lie_in_a_folder_of_its_own(tmp_path, place):
    root = write_run_folder(tmp_path / "run")
    (root / place).mkdir()
    (root / "3-embeddings/store.json").rename(root / place / "store.json")
    folder = RunFolder.load(root)
    assert list(folder.embeddings) == [place]
    assert folder.costs()[place] == Cost(4e11, 5.0, 2.5, 2)


def test_a_sweep_is_collected_and_its_mixtures_are_not_taken_for_others(tmp_path):
    sweep = write_sweep(write_run_folder(tmp_path / "run"), {"ridge": [Mixture.uniform(NAMES)] * 2})
    folder = RunFolder.load(tmp_path / "run")
    assert folder.sweep == sweep
    assert list(folder.mixtures) == ["chameleon-finetune", "chameleon-pretrain"]


def test_stages_that_have_not_been_run_are_empty(tmp_path):
    write_corpus(tmp_path / "1-corpus", NAMES)
    folder = RunFolder.load(tmp_path)
    stages = (folder.proxies, folder.embeddings, folder.mixtures, folder.base_runs)
    assert all(found == {} for found in (*stages, folder.evaluations))


def test_a_training_folder_without_run_json_is_passed_over(tmp_path, rng):
    write_training_run(tmp_path / "5-base/one", random_weights(NAMES, rng), "manual")
    (tmp_path / "5-base/logs").mkdir()
    assert list(RunFolder.load(tmp_path).base_runs) == ["one"]


def test_a_folder_without_any_stage_is_refused(tmp_path):
    with pytest.raises(UserError, match="no artifact of any stage"):
        RunFolder.load(tmp_path)


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        RunFolder.load(tmp_path / "runs")


@pytest.mark.parametrize(
    "file",
    [
        "1-corpus/corpus.json",
        "2-proxy/tiny-seed1/run.json",
        "3-embeddings/store.json",
        "4-mixture/chameleon-pretrain.json",
        "5-base/uniform-seed1/run.json",
        "6-evaluation/uniform-seed1.json",
    ],
)
def test_a_damaged_file_gives_its_own_error(tmp_path, file):
    path = write_run_folder(tmp_path / "run") / file
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: len(whole) // 2], encoding="utf-8")
    with pytest.raises(UserError, match="not JSON") as error:
        RunFolder.load(tmp_path / "run")
    assert str(path) in str(error.value)
    body = json.loads(whole)
    body["cost"] = "much"
    body.pop("checksum", None)
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(UserError, match="field cost"):
        RunFolder.load(tmp_path / "run")


def test_downstream_results_may_lie_among_the_evaluations_and_count(tmp_path):
    root = write_run_folder(tmp_path / "run")
    cost = Cost(1e12, 8.0, 4.0, 2)
    protocol = DownstreamProtocol("0.4.13", [0], None, 1234, "float32")
    result = DownstreamResult("k", "h", 200, protocol, {}, [], PROVENANCE, cost)
    result.save(root / "6-evaluation" / "uniform-seed1-tasks.json")
    folder = RunFolder.load(root)
    assert list(folder.evaluations) == list(folder.base_runs)
    assert folder.downstream == {"uniform-seed1-tasks": result}
    assert folder.costs()["6-evaluation/uniform-seed1-tasks"] == cost


@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_a_file_that_is_no_evaluation_of_any_kind_is_told(tmp_path, content):
    root = write_run_folder(tmp_path / "run")
    (root / "6-evaluation" / "odd.json").write_text(content)
    with pytest.raises(UserError, match=r"6-evaluation/odd\.json"):
        RunFolder.load(root)


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
    assert list(both.base_runs) == [CHAMELEON, f"{UNIFORM} (run-a)", f"{UNIFORM} (run-b)"]
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
    for part in (*hashes, str(roots[0] / "1-corpus"), str(other / "1-corpus")):
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
    with pytest.raises(UserError, match="of another corpus") as refused:
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
    with pytest.raises(UserError, match="different sweeps"):
        merged(roots)


def test_a_merged_folder_can_be_compared_with_a_chosen_baseline(roots):
    change_cost(roots[1] / f"5-base/{UNIFORM}/run.json", 999.0)
    both = merged(roots)
    comparison = compare(both, f"{UNIFORM} (run-b)")
    assert comparison.baseline is not None
    assert comparison.baseline.run is both.base_runs[f"{UNIFORM} (run-b)"]


@pytest.fixture
def root(tmp_path):
    return write_run_folder(tmp_path / "run")


def edit_evaluation(root, name, **changes):
    path = root / "6-evaluation" / f"{name}.json"
    dataclasses.replace(EvaluationResult.load(path), **changes).save(path)


def trained_on(root, name, corpus_hash, data_path=None):
    run = TrainingRun.load(root / "5-base" / name)
    provenance = dataclasses.replace(
        run.provenance, inputs={"corpus": corpus_hash}, options={"data": {"data_path": data_path}}
    )
    dataclasses.replace(run, provenance=provenance).save()


@pytest.mark.parametrize("names", [(UNIFORM,), (CHAMELEON,), RUNS])
def test_evaluations_on_another_corpus_than_the_folders_are_refused(root, names):
    for name in names:
        edit_evaluation(root, name, corpus_hash="other")
    with pytest.raises(UserError) as refused:
        compare(RunFolder.load(root))
    message = str(refused.value)
    assert any(str(root / "6-evaluation" / f"{name}.json") in message for name in names)
    assert str(root / "1-corpus") in message


def test_evaluations_on_another_corpus_than_their_runs_are_refused(root):
    folder = RunFolder.load(root)
    assert folder.corpus is not None
    trained_on(root, UNIFORM, folder.corpus.hash)
    trained_on(root, CHAMELEON, "other")
    for has_corpus in (True, False):
        if not has_corpus:
            shutil.rmtree(root / "1-corpus")
        with pytest.raises(UserError) as refused:
            compare(RunFolder.load(root))
        assert str(root / "5-base" / CHAMELEON) in str(refused.value)


@pytest.mark.parametrize("has_corpus", [True, False])
def test_runs_of_another_corpus_are_refused_though_not_evaluated(root, has_corpus):
    trained_on(root, CHAMELEON, "other")
    (root / f"6-evaluation/{CHAMELEON}.json").unlink()
    if not has_corpus:
        shutil.rmtree(root / "1-corpus")
    with pytest.raises(UserError, match="move it to a run folder of its corpus") as refused:
        compare(RunFolder.load(root))
    known = "1-corpus" if has_corpus else f"6-evaluation/{UNIFORM}.json"
    assert f"{root / '5-base' / CHAMELEON} is of another corpus" in str(refused.value)
    assert str(root / known) in str(refused.value)


@pytest.mark.parametrize("has_corpus", [True, False])
def test_a_sweep_of_another_corpus_is_refused(root, has_corpus):
    known = RunFolder.load(root).evaluations[UNIFORM].corpus_hash
    mixtures = {"ridge": [Mixture.load(root / "4-mixture/chameleon-pretrain.json")] * 2}
    provenance = RunFolder.load(root).mixtures["chameleon-pretrain"].provenance
    assert provenance is not None
    if not has_corpus:
        shutil.rmtree(root / "1-corpus")
    for inputs in ({}, {"corpus": known}, {"corpus": "other"}):
        made = dataclasses.replace(provenance, inputs=inputs)
        write_sweep(root, mixtures, provenance=made)
        if inputs != {"corpus": "other"}:
            compare(RunFolder.load(root))
    with pytest.raises(UserError, match="of another corpus") as refused:
        compare(RunFolder.load(root))
    assert str(root / "sweep.json") in str(refused.value)
    with pytest.raises(UserError, match="of another corpus"):
        merge([RunFolder.load(root), RunFolder.load(write_run_folder(root.parent / "second"))])


def test_a_sweep_by_itself_is_held_against_the_corpus_of_other_folders(root):
    mixture = RunFolder.load(root).mixtures["chameleon-pretrain"]
    assert mixture.provenance is not None
    alone = root.parent / "alone"
    mixture.save(alone / "4-mixture/chameleon-pretrain.json")
    for corpus_hash in (RunFolder.load(root).evaluations[UNIFORM].corpus_hash, "other"):
        made = dataclasses.replace(mixture.provenance, inputs={"corpus": corpus_hash})
        write_sweep(alone, {"ridge": [mixture] * 2}, provenance=made)
        folders = [RunFolder.load(root), RunFolder.load(alone)]
        if corpus_hash != "other":
            assert merge(folders).sweep is not None
    with pytest.raises(UserError, match=r"sweep\.json is of another corpus \(hash other\) than"):
        merge(folders)


def test_a_run_by_data_path_that_was_not_evaluated_is_let_be(root):
    trained_on(root, CHAMELEON, "hash of files", data_path=["a"])
    (root / f"6-evaluation/{CHAMELEON}.json").unlink()
    assert len(compare(RunFolder.load(root)).runs) == 1


def test_a_mixture_with_other_domains_is_refused_with_their_names(root):
    path = root / "4-mixture/foreign.json"
    Mixture.uniform([*NAMES, "v", "w", "x", "y", "z"]).save(path)
    with pytest.raises(UserError) as refused:
        compare(RunFolder.load(root))
    assert str(refused.value) == (
        f"{path} has weights for domains that the corpus in {root / '1-corpus'} does not have: "
        f"v, w, x and 2 more; compute it with --corpus {root / '1-corpus'}, or move the file to a "
        "run folder of its corpus"
    )


def test_a_mixture_of_some_of_the_domains_is_no_other_corpus(root):
    Mixture.uniform(NAMES[:2]).save(root / "4-mixture/part.json")
    assert len(compare(RunFolder.load(root)).runs) == 2


def test_runs_of_the_same_corpus_or_of_files_by_path_are_compared(root):
    folder = RunFolder.load(root)
    assert folder.corpus is not None
    trained_on(root, UNIFORM, folder.corpus.hash)
    trained_on(root, CHAMELEON, "hash of files", data_path=["0.5", "a", "0.5", "b"])
    assert len(compare(RunFolder.load(root)).runs) == 2


def test_a_domain_without_held_out_text_is_a_row_of_dashes(root):
    for name in RUNS:
        result = EvaluationResult.load(root / f"6-evaluation/{name}.json")
        domains = {n: dataclasses.replace(d, text_bytes=2000) for n, d in result.domains.items()}
        domains.pop("prose")
        edit_evaluation(root, name, domains=domains, left_out=["prose"])
    folder = RunFolder.load(root)
    comparison = compare(folder)
    bits = bits_per_byte_table(comparison)
    assert bits is not None
    tables = [perplexity_of(folder), loss_table(comparison), bits]
    for table in tables:
        assert [row[0] for row in table.rows] == NAMES
        assert len({len(row) for row in (table.header, *table.rows, *table.summary)}) == 1
    weight, interval, *others = (cell for cell in tables[0].rows[-1][1:])
    assert float(weight) == pytest.approx(folder.base_runs[CHAMELEON].mixture["prose"], abs=5e-5)
    assert " to " in interval
    assert set(others) == {"-"}
    assert set(tables[1].rows[-1][1:]) == {"-"}
    assert set(tables[2].rows[-1][1:]) == {"-"}
    assert "Nothing to predict, and not in the average: prose." in tables[0].notes
    # The average is that of the others.
    first = comparison.runs[0].result
    assert tables[0].summary[0][-2] == f"{first.mean_perplexity:.2f}"
    assert tables[0].summary[1][-1].endswith("of 2")
