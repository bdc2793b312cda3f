from __future__ import annotations

import json

import pytest

from megatron_chameleon.artifacts import Cost, Mixture
from megatron_chameleon.artifacts.downstream_result import DownstreamProtocol, DownstreamResult
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.report_samples import (
    NAMES,
    PROVENANCE,
    random_weights,
    write_corpus,
    write_run_folder,
    write_sweep,
    write_training_run,
)


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
