from __future__ import annotations

import dataclasses
import math
import re

import pytest

from megatron_chameleon.artifacts import EvaluationResult, Mixture, TrainingRun
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.tables import is_best
from tests.unit.report.report_samples import (
    NAMES,
    PROTOCOL,
    columns,
    evaluation,
    perplexity_of,
    random_mixture,
    random_weights,
    write_run_folder,
    write_training_run,
)

CHAMELEON = "chameleon-pretrain-seed1"


@pytest.fixture
def root(tmp_path):
    return write_run_folder(tmp_path / "run")


def edit_run(root, name, **changes):
    run = TrainingRun.load(root / "5-base" / name)
    dataclasses.replace(run, **changes).save()


def edit_evaluation(root, name, **changes):
    path = root / "6-evaluation" / f"{name}.json"
    dataclasses.replace(EvaluationResult.load(path), **changes).save(path)


def add_run(root, name, weights, method, losses):
    write_training_run(root / "5-base" / name, weights, method)
    other = EvaluationResult.load(root / "6-evaluation/uniform-seed1.json")
    result = evaluation(NAMES, losses, corpus_hash=other.corpus_hash)
    result.save(root / "6-evaluation" / f"{name}.json")


def test_the_main_table_has_the_numbers_of_the_artifacts(root):
    found = columns(perplexity_of(RunFolder.load(root)))
    assert list(found) == [
        "domain",
        "weight",
        "95% interval",
        "unigram perplexity",
        "perplexity Uniform",
        "perplexity Chameleon",
    ]
    mixture = Mixture.load(root / "4-mixture/chameleon-pretrain.json")
    results = [
        EvaluationResult.load(root / f"6-evaluation/{name}.json")
        for name in ("uniform-seed1", CHAMELEON)
    ]
    assert mixture.intervals is not None
    for i, name in enumerate(NAMES):
        low, high = mixture.intervals[name]
        assert found["domain"][i] == name
        assert float(found["weight"][i]) == pytest.approx(mixture.weights[name], abs=5e-5)
        assert [float(end) for end in found["95% interval"][i].split(" to ")] == pytest.approx(
            [low, high], abs=5e-5
        )
        for heading, result in zip(list(found)[-2:], results, strict=True):
            expected = math.e ** result.domains[name].loss
            assert float(found[heading][i]) == pytest.approx(expected, abs=5e-3)
        unigram = math.e ** results[0].domains[name].unigram_loss
        assert float(found["unigram perplexity"][i]) == pytest.approx(unigram, abs=5e-3)


def test_averages_and_counts_are_over_domains(root):
    edit_evaluation(root, "uniform-seed1", domains=evaluation(NAMES, [1.0, 2.0, 3.0]).domains)
    edit_evaluation(root, CHAMELEON, domains=evaluation(NAMES, [0.9, 2.1, 3.0]).domains)
    table = perplexity_of(RunFolder.load(root))
    average, better = (list(row) for row in table.summary)
    uniform = (math.e + math.e**2 + math.e**3) / 3
    chameleon = (math.exp(0.9) + math.exp(2.1) + math.exp(3.0)) / 3
    unigram = (math.exp(6.0) + math.exp(6.1) + math.exp(6.2)) / 3
    assert average[-3:] == [f"{unigram:.2f}", f"{uniform:.2f}", f"{chameleon:.2f}"]
    assert better[0] == "domains better than Uniform"
    assert better[-2:] == ["-", "1 of 3"]  # equal is not better
    marks = [[is_best(cell) for cell in row[-2:]] for row in table.rows]
    assert marks == [[False, True], [True, False], [True, True]]
    assert [is_best(cell) for cell in table.summary[0][-2:]] == [True, False]
    change = 100 * (chameleon / uniform - 1)
    assert table.notes[-1] == (
        f"Chameleon has an average perplexity of {chameleon:.2f}, Uniform of {uniform:.2f} "
        f"(+{change:.1f}%); Chameleon is lower in 1 of 3 domains."
    )


def test_the_baseline_can_be_chosen(root):
    table = perplexity_of(RunFolder.load(root), baseline=CHAMELEON)
    assert table.header[-2:] == ("perplexity Chameleon", "perplexity Uniform")
    assert table.summary[1][0] == "domains better than Chameleon"
    # The weights shown are those of the runs that are compared with the baseline.
    assert {row[1] for row in table.rows} == {f"{1 / 3:.4f}"}


def test_an_unknown_baseline_is_refused_with_the_choices(root):
    with pytest.raises(UserError, match=r"--baseline x: .* choose from chameleon.*, uniform-seed1"):
        perplexity_of(RunFolder.load(root), baseline="x")


def test_further_runs_become_columns_with_their_own_weights(root, rng):
    weights = random_weights(NAMES, rng)
    intervals = {name: (w / 2, w * 2) for name, w in weights.items()}
    features = rng.normal(size=(3, 4))
    random_mixture(weights, "pretrain", features, intervals=intervals, confidence=0.9).save(
        root / "4-mixture/scaled-pretrain.json"
    )
    add_run(root, "scaled-pretrain-seed1", weights, "chameleon-pretrain", [1.0, 1.0, 1.0])
    add_run(root, "by-hand-seed1", random_weights(NAMES, rng), "manual", [2.0, 2.0, 2.0])
    found = columns(perplexity_of(RunFolder.load(root)))
    # Two runs of one method go by their names.
    assert list(found) == [
        "domain",
        "by-hand-seed1 weight",
        f"{CHAMELEON} weight",
        f"{CHAMELEON} 95% interval",
        "scaled-pretrain-seed1 weight",
        "scaled-pretrain-seed1 90% interval",
        "unigram perplexity",
        "perplexity Uniform",
        "perplexity by-hand-seed1",
        f"perplexity {CHAMELEON}",
        "perplexity scaled-pretrain-seed1",
    ]
    low, high = intervals["code"]
    assert found["scaled-pretrain-seed1 90% interval"][0] == f"{low:.4f} to {high:.4f}"
    assert found["perplexity scaled-pretrain-seed1"][-1] == "3 of 3"


def test_beside_weights_for_fine_tuning_those_for_pretraining_are_called_so(root, rng):
    losses = rng.uniform(2, 4, len(NAMES))
    add_run(root, "tuned", random_weights(NAMES, rng), "chameleon-finetune", losses)
    assert list(columns(perplexity_of(RunFolder.load(root))))[-3:] == [
        "perplexity Uniform",
        "perplexity Chameleon (pretraining)",
        "perplexity Chameleon (fine-tuning)",
    ]


def test_two_seeds_of_one_mixture_share_a_column_of_weights(root):
    weights = TrainingRun.load(root / "5-base" / CHAMELEON).mixture
    add_run(root, "chameleon-pretrain-seed2", weights, "chameleon-pretrain", [1.0, 1.0, 1.0])
    header = perplexity_of(RunFolder.load(root)).header
    assert header[:3] == ("domain", "weight", "95% interval")
    assert header[-1] == "perplexity chameleon-pretrain-seed2"


def test_another_seed_of_the_baseline_is_told_from_another_mixture(root):
    weights = TrainingRun.load(root / "5-base/uniform-seed1").mixture
    add_run(root, "uniform-again", weights, "uniform", [1.0, 1.0, 1.0])
    notes = perplexity_of(RunFolder.load(root), "uniform-seed1").notes
    same = [note for note in notes if "trained with the same weights" in note]
    assert len(same) == 1
    assert same[0].startswith("uniform-again,")


def test_seeds_have_a_column_each_and_one_sentence(root):
    weights = TrainingRun.load(root / "5-base/uniform-seed1").mixture
    add_run(root, "uniform-seed2", weights, "uniform", [1.0, 1.0, 1.0])
    weights = TrainingRun.load(root / "5-base" / CHAMELEON).mixture
    add_run(root, "chameleon-pretrain-seed2", weights, "chameleon-pretrain", [2.0] * 3)
    table = perplexity_of(RunFolder.load(root))
    assert sum(heading.startswith("perplexity ") for heading in table.header) == 4
    assert not any("uniform-seed" in note for note in table.notes)
    (sentence,) = [note for note in table.notes if "average perplexity" in note]
    assert sentence.startswith("Chameleon has an average perplexity of ")
    assert "over 2 seeds, Uniform of " in sentence


def test_an_infinite_perplexity_is_not_the_best_and_has_no_ratio(root):
    edit_evaluation(root, "uniform-seed1", domains=evaluation(NAMES, [800.0, 2.0, 800.0]).domains)
    edit_evaluation(root, CHAMELEON, domains=evaluation(NAMES, [800.0, 900.0, 3.0]).domains)
    table = perplexity_of(RunFolder.load(root))
    marks = [[is_best(cell) for cell in row[-2:]] for row in (*table.rows, table.summary[0])]
    assert marks == [[False, False], [True, False], [False, True], [False, False]]
    assert table.notes[-1] == (
        "Chameleon has an average perplexity of inf, Uniform of inf; "
        "Chameleon is lower in 1 of 3 domains."
    )


def test_of_two_files_with_the_same_weights_the_runs_own_gives_the_intervals(root):
    own = root / "4-mixture/chameleon-pretrain.json"
    for name, confidence in (("another", 0.5), ("zzz", 0.6)):
        same = dataclasses.replace(Mixture.load(own), confidence=confidence)
        same.save(root / f"4-mixture/{name}.json")
    assert perplexity_of(RunFolder.load(root)).header[2] == "95% interval"


def test_without_a_uniform_run_there_is_no_baseline(root):
    edit_run(root, "uniform-seed1", mixture_method="manual")
    table = perplexity_of(RunFolder.load(root))
    assert [row[0] for row in table.summary] == ["average"]
    assert not any("lower in" in note for note in table.notes)


def test_a_single_run_has_no_marks_and_shows_its_own_weights(root):
    (root / f"6-evaluation/{CHAMELEON}.json").unlink()
    table = perplexity_of(RunFolder.load(root))
    assert table.header == ("domain", "weight", "unigram perplexity", "perplexity Uniform")
    assert not any(is_best(cell) for row in (*table.rows, *table.summary) for cell in row)
    assert table.notes[0].endswith("Lower is better.")


def test_an_evaluation_without_its_base_run_goes_by_its_name(root):
    (root / f"5-base/{CHAMELEON}/run.json").unlink()
    table = perplexity_of(RunFolder.load(root))
    assert table.header[-1] == f"perplexity {CHAMELEON}"
    assert "weight" not in table.header


def test_a_domain_that_the_mixture_leaves_out_has_weight_zero(root):
    weights = {"code": 0.25, "prose": 0.75}
    edit_run(root, CHAMELEON, mixture={**weights, "a|b_<x>": 0.0})
    Mixture(weights, method="chameleon-pretrain", intervals={"code": (0.2, 0.3)}).save(
        root / "4-mixture/chameleon-pretrain.json"
    )
    found = columns(perplexity_of(RunFolder.load(root)))
    assert found["weight"][:3] == ("0.2500", "0.0000", "0.7500")
    assert found["interval"][:3] == ("0.2000 to 0.3000", "-", "-")


def test_intervals_of_a_mixture_made_anew_are_not_shown_with_the_old_weights(root, rng):
    random_mixture(random_weights(NAMES, rng), "pretrain", rng.normal(size=(3, 4))).save(
        root / "4-mixture/chameleon-pretrain.json"
    )
    table = perplexity_of(RunFolder.load(root))
    assert not any("interval" in heading for heading in table.header)
    assert any("4-mixture/chameleon-pretrain.json has changed" in note for note in table.notes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parameters": 2_000_000}, "'parameters': Uniform 1,000,000, Chameleon 2,000,000"),
        ({"tokens": 5}, "'training tokens'"),
        ({"status": "interrupted"}, r"not finished: Chameleon \(interrupted\)"),
    ],
)
def test_runs_that_are_not_alike_are_noted(root, changes, told):
    assert len(perplexity_of(RunFolder.load(root)).notes) == 2
    edit_run(root, CHAMELEON, **changes)
    notes = perplexity_of(RunFolder.load(root)).notes
    assert len(notes) == 3
    assert re.search(told, notes[1])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"corpus_hash": "other"}, "of another corpus"),
        ({"protocol": dataclasses.replace(PROTOCOL, window_length=32)}, "different protocols"),
        ({"domains": evaluation(["code", "prose"], [1.0, 1.0]).domains}, r"domain 'a\|b_<x>'"),
    ],
)
def test_evaluations_that_cannot_be_compared_are_refused(root, changes, told):
    edit_evaluation(root, "uniform-seed1", **changes)
    with pytest.raises(UserError, match=told):
        perplexity_of(RunFolder.load(root))
