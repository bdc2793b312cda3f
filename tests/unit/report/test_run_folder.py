"""Read run folders, merge them, and reject folders with different corpora."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from megatron_chameleon.artifacts import Cost, Mixture
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange import write_blend
from megatron_chameleon.report.cost import ledger_of
from megatron_chameleon.report.results import compare
from megatron_chameleon.report.run_folder import RunFolder, distinct_runs, merge
from tests.unit.report.samples import (
    CHAMELEON,
    NAMES,
    PROVENANCE,
    UNIFORM,
    edit,
    edit_evaluation,
    edit_run,
    write_run_folder,
    write_training_run,
)


@pytest.fixture
def roots(tmp_path):
    """Two folders with equal content."""
    first = write_run_folder(tmp_path / "run-a")
    shutil.copytree(first, tmp_path / "run-b")
    return [first, tmp_path / "run-b"]


def merged(roots):
    return merge([RunFolder.load(root) for root in roots])


def seconds(folder):
    return ledger_of(folder).total.device_seconds


def test_copies_are_listed_and_counted_once(roots):
    one, both = RunFolder.load(roots[0]), merged(roots)
    for field in ("proxies", "embeddings", "mixtures", "base_runs", "evaluations"):
        assert list(getattr(both, field)) == list(getattr(one, field))
    assert both.costs() == one.costs()
    assert ledger_of(both) == ledger_of(one)
    assert both.root == roots[0]


def test_colliding_names_get_the_folder_appended(roots):
    edit_run(roots[1], UNIFORM, cost=Cost(0.0, 999.0))
    both = merged(roots)
    assert list(both.base_runs) == [CHAMELEON, f"{UNIFORM} (run-a)", f"{UNIFORM} (run-b)"]
    # Evaluations are renamed with their runs.
    assert list(both.evaluations) == list(both.base_runs)
    costs = [both.base_runs[f"{UNIFORM} ({run})"].cost for run in ("run-a", "run-b")]
    assert [cost.device_seconds for cost in costs] == [60.0, 999.0]
    assert seconds(both) == pytest.approx(seconds(RunFolder.load(roots[0])) + 999.0)


def test_a_run_keeps_its_name_if_a_mixture_has_the_same_name(roots):
    mixture = "chameleon-pretrain"
    for root in roots:
        (root / f"5-base/{CHAMELEON}").rename(root / f"5-base/{mixture}")
        (root / f"6-evaluation/{CHAMELEON}.json").rename(root / f"6-evaluation/{mixture}.json")
    edit(roots[1] / f"4-mixture/{mixture}.json", cost=Cost(0.0, 999.0))
    both = merged(roots)
    assert [f"{mixture} (run-a)", f"{mixture} (run-b)"] == list(both.mixtures)[1:]
    assert list(both.base_runs) == list(both.evaluations) == [mixture, UNIFORM]


def test_an_identical_run_with_two_evaluations_is_counted_once(roots):
    edit_evaluation(roots[1], UNIFORM, cost=Cost(1e9, 7.0, 7.0, 1))
    both, names = merged(roots), [f"{UNIFORM} (run-a)", f"{UNIFORM} (run-b)"]
    assert list(both.evaluations) == [CHAMELEON, *names]
    assert all(run.run is not None for run in compare(both).runs)
    assert distinct_runs(both, both.base_runs) == [names[0], CHAMELEON]
    once = seconds(RunFolder.load(roots[0]))
    assert seconds(both) == pytest.approx(once + 7.0)  # run-b adds an evaluation


def test_a_linked_proxy_counts_once_for_references_from_any_folder(roots):
    proxy = roots[1] / "2-proxy/tiny-seed1"
    shutil.rmtree(proxy)
    proxy.symlink_to(roots[0] / "2-proxy/tiny-seed1")
    weights, parameters = Mixture.uniform(NAMES).weights, {"made_from": ["../2-proxy/tiny-seed1"]}
    mixture = Mixture(weights, "doremi", parameters, cost=Cost(1e9, 7.0))
    for root, name in zip(roots, ("one", "two"), strict=True):
        mixture.save(root / f"4-mixture/{name}.json")
    both = merged(roots)
    for folder in (both, RunFolder.load(roots[1])):
        entries = [entry for entry in ledger_of(folder).entries if "tiny-seed1" in entry]
        assert entries == ["2-proxy/tiny-seed1"]
    ledger = ledger_of(both)
    for name in ("one", "two"):
        assert list(ledger.mixtures[name].parts) == [f"4-mixture/{name}", "2-proxy/tiny-seed1"]
    once = seconds(RunFolder.load(roots[0]))
    assert seconds(both) == pytest.approx(once + 7.0)  # run-b adds a mixture


def test_mixtures_of_the_same_name_are_read_from_their_folders(roots):
    weights = Mixture.uniform(NAMES).weights
    costs = {"a": Cost(0.0, 100.0), "b": Cost(0.0, 200.0)}
    for root, (name, cost) in zip(roots, costs.items(), strict=True):
        write_training_run(root / f"4-mixture/doge/proxy-{name}", weights, "uniform", cost=cost)
        mixture = Mixture(weights, "doge", {"made_from": [f"doge/proxy-{name}"]})
        mixture.save(root / "4-mixture/doge.json")
    ledger = ledger_of(merged(roots))
    for name, cost in costs.items():
        paid = ledger.mixtures[f"doge (run-{name})"]
        assert (paid.cost.device_seconds, paid.missing) == (cost.device_seconds, ())
        assert f"4-mixture/doge/proxy-{name} (run-{name})" in ledger.entries


def test_another_corpus_is_rejected(tmp_path, root):
    other = write_run_folder(tmp_path / "run-c", ["x", "y"])
    with pytest.raises(UserError, match=f"{other / '1-corpus'} is of another corpus"):
        merged([root, other])


@pytest.mark.parametrize("has_corpus", [True, False])
def test_unevaluated_runs_of_another_corpus_are_rejected(root, has_corpus):
    made = dataclasses.replace(PROVENANCE, inputs={"corpus": "other"})
    edit_run(root, CHAMELEON, provenance=made)
    (root / f"6-evaluation/{CHAMELEON}.json").unlink()
    if not has_corpus:
        shutil.rmtree(root / "1-corpus")
    with pytest.raises(UserError, match=f"{root / '5-base' / CHAMELEON} is of another corpus"):
        compare(RunFolder.load(root))


def test_blends_next_to_mixtures_are_no_mixtures(roots):
    before = RunFolder.load(roots[0]).mixtures
    for name, mixture in before.items():
        write_blend(roots[0] / f"4-mixture/{name}.json", mixture, None)
    assert RunFolder.load(roots[0]).mixtures == before
