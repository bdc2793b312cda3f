"""Tables of weights: none shows a weight that there is not, and none hides one that there is."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.report.figures import weight_series
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.weights import mode_of, weight_tables
from tests.unit.report.report_samples import (
    NAMES,
    columns,
    random_mixture,
    random_weights,
    write_run_folder,
)

ALL = "Weights of each mixture"
FINE_TUNING = "Weights for pretraining and fine-tuning"


def all_weights(folder):
    (table,) = [table for table in weight_tables(folder) if table.title == ALL]
    return table


def fine_tuning_tables(folder):
    return [table for table in weight_tables(folder) if table.title.startswith(FINE_TUNING)]


@pytest.fixture
def root(tmp_path):
    return write_run_folder(tmp_path / "run")


def add_mixture(root, rng, name, mode, **changes):
    mixture = random_mixture(random_weights(NAMES, rng), mode, rng.normal(size=(3, 4)), **changes)
    mixture.save(root / f"4-mixture/{name}.json")
    return mixture


def titles(root):
    return [table.title for table in weight_tables(RunFolder.load(root))]


def test_two_mixtures_that_stand_beside_each_other_need_no_third_table(root):
    assert titles(root) == [FINE_TUNING]


def test_no_mixture_is_missing_from_every_table(root):
    (root / "4-mixture/chameleon-pretrain.json").unlink()
    mixture = Mixture(dict(zip(NAMES, (0.2, 0.3, 0.5), strict=True)), method="doremi")
    mixture.save(root / "4-mixture/doremi.json")
    assert titles(root) == [ALL, FINE_TUNING]
    found = columns(weight_tables(RunFolder.load(root))[0])
    assert found["doremi weight"] == ("0.2000", "0.3000", "0.5000")


def test_a_domain_that_a_mixture_does_not_have_has_no_weight(root):
    Mixture({"code": 1.0, "prose": 0.0}, method="manual").save(root / "4-mixture/part.json")
    table = all_weights(RunFolder.load(root))
    assert table is not None
    found = columns(table)
    by_domain = dict(zip(found["domain"], found["part weight"], strict=True))
    assert by_domain == {"code": "1.0000", "prose": "0.0000", "a|b_<x>": "-"}


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("doremi", None),
        ("manual", None),
        ("", "pretrain"),
        ("chameleon", "pretrain"),
        ("chameleon-pretrain", "pretrain"),
    ],
)
def test_only_chameleons_mixtures_are_for_what_their_names_say(method, mode):
    mixture = dataclasses.replace(Mixture.uniform(NAMES), method=method)
    assert mode_of("some-pretrain", mixture) == mode
    stated = dataclasses.replace(mixture, parameters={"mode": "finetune"})
    assert mode_of("some-pretrain", stated) == "finetune"


def test_another_methods_mixture_is_not_taken_for_chameleons(root, rng):
    (root / "4-mixture/chameleon-pretrain.json").unlink()
    add_mixture(root, rng, "doremi-pretrain", "pretrain", method="doremi", parameters={})
    folder = RunFolder.load(root)
    assert list(weight_series(folder)) == ["fine-tuning", "doremi-pretrain"]
    (table,) = fine_tuning_tables(folder)
    assert not any("pretraining" in heading for heading in table.header)


def test_a_mixture_called_like_the_label_of_another_does_not_hide_it(root):
    Mixture.uniform(NAMES).save(root / "4-mixture/chameleon.json")
    Mixture(Mixture.uniform(NAMES).weights).save(root / "4-mixture/pretraining.json")
    assert set(weight_series(RunFolder.load(root))) == {
        "chameleon-pretrain",
        "fine-tuning",
        "pretraining",
    }


def test_tables_of_several_mixtures_for_fine_tuning_have_their_names(root, rng):
    scaled = add_mixture(root, rng, "scaled-finetune", "finetune")
    partner = add_mixture(root, rng, "scaled-pretrain", "pretrain")
    tables = fine_tuning_tables(RunFolder.load(root))
    assert [table.title for table in tables] == [
        f"{FINE_TUNING}: chameleon-finetune",
        f"{FINE_TUNING}: scaled-finetune",
    ]
    for heading, mixture in (("pretraining", partner), ("fine-tuning", scaled)):
        found = columns(tables[1])[f"{heading} weight"]
        assert found == tuple(f"{mixture.weights[name]:.4f}" for name in NAMES)
    assert not any("the only ones" in note for table in tables for note in table.notes)


def test_pretraining_weights_of_another_name_are_told(root, rng):
    add_mixture(root, rng, "scaled-finetune", "finetune")
    own, other = (table.notes for table in fine_tuning_tables(RunFolder.load(root)))
    assert own == ()
    told = "The pretraining weights are those of chameleon-pretrain, the only ones here."
    assert other == (told,)


def test_fine_tuning_weights_stand_beside_the_pretraining_weights(root):
    (table,) = fine_tuning_tables(RunFolder.load(root))
    found = columns(table)
    pretrain, finetune = (
        Mixture.load(root / f"4-mixture/chameleon-{mode}.json") for mode in ("pretrain", "finetune")
    )
    assert list(found) == [
        "domain",
        "leverage score",
        "pretraining weight",
        "pretraining 95% interval",
        "fine-tuning weight",
        "fine-tuning 95% interval",
    ]
    assert finetune.scores is not None
    assert finetune.intervals is not None
    assert found["leverage score"] == tuple(f"{finetune.scores[n]:.4f}" for n in NAMES)
    assert found["pretraining weight"] == tuple(f"{pretrain.weights[n]:.4f}" for n in NAMES)
    assert found["fine-tuning weight"] == tuple(f"{finetune.weights[n]:.4f}" for n in NAMES)
    low, high = finetune.intervals["prose"]
    assert found["fine-tuning 95% interval"][2] == f"{low:.4f} to {high:.4f}"
    assert table.notes == ()


def test_fine_tuning_weights_from_other_scores_are_noted(root):
    path = root / "4-mixture/chameleon-pretrain.json"
    mixture = Mixture.load(path)
    dataclasses.replace(mixture, scores={**(mixture.scores or {}), "code": 0.5}).save(path)
    (table,) = fine_tuning_tables(RunFolder.load(root))
    assert table.notes == ("The pretraining weights come from other scores than those shown.",)


def test_fine_tuning_weights_stand_alone_without_pretraining_weights(root):
    (root / "4-mixture/chameleon-pretrain.json").unlink()
    (table,) = fine_tuning_tables(RunFolder.load(root))
    assert table.header[2:] == ("fine-tuning weight", "fine-tuning 95% interval")
    (root / "4-mixture/chameleon-finetune.json").unlink()
    assert fine_tuning_tables(RunFolder.load(root)) == []
