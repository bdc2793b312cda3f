"""Labels of runs that no two share, and the mixture that a run is named after."""

from __future__ import annotations

import shutil

import pytest

from megatron_chameleon.artifacts import Mixture, TrainingRun
from megatron_chameleon.report.comparison import caveats, compare, mixture_of, run_labels
from megatron_chameleon.report.downstream import downstream_tables
from megatron_chameleon.report.run_folder import RunFolder, merge
from megatron_chameleon.report.tables import unique_labels
from tests.unit.report.downstream_samples import downstream, save
from tests.unit.report.report_samples import (
    NAMES,
    random_mixture,
    random_weights,
    write_run_folder,
    write_training_run,
)

CHAMELEON = "chameleon-pretrain-seed1"
UNIFORM = Mixture.uniform(NAMES).weights


@pytest.fixture
def root(tmp_path):
    return write_run_folder(tmp_path / "run")


def write_mixture(root, name, rng):
    mixture = random_mixture(random_weights(NAMES, rng), "pretrain", rng.normal(size=(3, 4)))
    mixture.save(root / f"4-mixture/{name}.json")
    return mixture


def changed(folder):
    return [each for each in caveats(folder, compare(folder)) if "has changed since" in each]


def test_a_run_called_like_the_label_of_another_does_not_take_it(root):
    write_training_run(root / "5-base/Chameleon", UNIFORM, "manual")
    folder = RunFolder.load(root)
    assert run_labels(folder.base_runs, folder.base_runs) == {
        "Chameleon": "Chameleon",
        CHAMELEON: CHAMELEON,
        "uniform-seed1": "Uniform",
    }
    # Nor in the tables, where that run is not shown.
    assert [run.label for run in compare(folder).runs] == ["Uniform", CHAMELEON]


def test_names_that_labels_fall_back_to_are_theirs_alone():
    labels = {"a": "x", "x": "x", "b": "a", "c": "c"}
    assert unique_labels(labels) == {"a": "a", "x": "x", "b": "b", "c": "c"}


def test_downstream_results_called_like_labels_keep_a_column_each(root):
    tasks = {"sciq": {0: 0.5, 1: 0.7}}
    write_training_run(root / "5-base/Chameleon", UNIFORM, "manual")
    for name in ("Chameleon", CHAMELEON):
        save(root, f"{name}-downstream", downstream(tasks))
    header = downstream_tables(RunFolder.load(root))[0].header
    assert len(set(header)) == len(header)


def test_only_the_mixture_that_a_run_is_named_after_has_changed(root, rng):
    for name in ("chameleon", "chameleon-pre", "chameleon-pretrain"):
        write_mixture(root, name, rng)
    folder = RunFolder.load(root)
    (told,) = changed(folder)
    assert told.startswith(f"{folder.mixture_file('chameleon-pretrain')} has changed since ")
    assert f"{root / '5-base' / CHAMELEON} was trained" in told
    (root / "4-mixture/chameleon-pretrain.json").unlink()
    (told,) = changed(RunFolder.load(root))
    assert told.startswith(str(root / "4-mixture/chameleon.json"))


def test_a_changed_mixture_is_told_where_it_lies_after_a_merge(root, tmp_path, rng):
    other = tmp_path / "other"
    shutil.copytree(root, other)
    write_mixture(other, "chameleon-pretrain", rng)
    trained = random_weights(NAMES, rng)
    write_training_run(other / "5-base" / CHAMELEON, trained, "chameleon-pretrain")
    both = merge([RunFolder.load(root), RunFolder.load(other)])
    assert f"{CHAMELEON} (other)" in both.base_runs
    (told,) = changed(both)
    assert told.startswith(f"{other / '4-mixture/chameleon-pretrain.json'} has changed since ")
    assert str(other / "5-base" / CHAMELEON) in told


def test_of_mixtures_with_the_same_weights_a_merged_run_has_that_of_its_folder(root, tmp_path, rng):
    other = tmp_path / "other"
    shutil.copytree(root, other)
    weights = TrainingRun.load(root / "5-base" / CHAMELEON).mixture
    random_mixture(weights, "pretrain", rng.normal(size=(3, 4)), confidence=0.5).save(
        other / "4-mixture/chameleon-pretrain.json"
    )
    run = write_training_run(other / "5-base" / CHAMELEON, weights, "chameleon-pretrain", step=7)
    both = merge([RunFolder.load(root), RunFolder.load(other)])
    (merged_run,) = [each for each in compare(both).runs if each.run == run]
    found = mixture_of(both, merged_run)
    assert found is not None
    assert found[0] == "chameleon-pretrain (other)"
