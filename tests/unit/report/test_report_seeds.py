"""Seeds of one method: which runs they are, their means and deviations, and what is said."""

from __future__ import annotations

import math
import statistics

import pytest

from megatron_chameleon.report.comparison import (
    Comparison,
    Evaluated,
    Spread,
    findings,
    seed_groups,
    seed_of,
    verdicts,
)
from megatron_chameleon.report.perplexity import seed_table
from megatron_chameleon.report.tables import is_best
from tests.unit.report.report_samples import NAMES, evaluation, write_training_run

EVEN = dict.fromkeys(NAMES, 1 / 3)
SKEWED = dict(zip(NAMES, (0.5, 0.3, 0.2), strict=True))


@pytest.fixture
def run_of(tmp_path):
    """Makes an evaluated run with these perplexities per domain."""

    def make(name, perplexities, weights=EVEN, method="uniform", label=None):
        run = write_training_run(tmp_path / name, weights, method)
        result = evaluation(NAMES, [math.log(p) for p in perplexities])
        return Evaluated(name, label or name, result, run)

    return make


@pytest.fixture
def seeded(run_of):
    """Three seeds of uniform and of Chameleon, of which two are the same."""
    uniform = [(1, 20.0), (2, 22.0), (3, 24.0)]
    other = [(2, 19.0), (3, 20.0), (4, 21.0)]
    runs = [run_of(f"uniform-seed{s}", [p - 3, p, p + 3]) for s, p in uniform]
    for seed, p in other:
        figures = [p - 3, p + 3, p]
        runs.append(run_of(f"chameleon-seed{seed}", figures, SKEWED, "chameleon-pretrain"))
    return Comparison(tuple(runs), runs[0])


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("uniform-seed1", 1),
        ("a-b-seed12", 12),
        ("uniform-seed3 (run-b)", 3),
        ("uniform-seed4-long", 4),
        ("seed1", None),
        ("uniform", None),
        ("linseed1", None),
    ],
)
def test_the_seed_is_read_from_the_name(name, seed):
    assert seed_of(name) == seed


def test_a_spread_is_the_mean_and_the_samples_deviation():
    assert Spread.of([1.0, 2.0, 6.0]) == Spread(3.0, statistics.stdev([1.0, 2.0, 6.0]), 3)
    assert Spread.of([4.0]) == Spread(4.0, None, 1)
    assert Spread.of([4.0, math.inf]) == Spread(math.inf, None, 2)


def test_runs_of_one_method_are_one_group_in_the_order_of_seeds(run_of):
    names = ["uniform-seed10", "uniform-seed9", "uniform"]
    runs = [run_of(name, [9, 9, 9]) for name in names]
    runs += [run_of("uniform-seed2", [9, 9, 9], SKEWED), run_of("other-seed9", [9, 9, 9])]
    found = [[r.name for r in group.runs] for group in seed_groups(Comparison(tuple(runs), None))]
    assert found == [
        ["uniform-seed9", "uniform-seed10"],
        ["uniform"],
        ["uniform-seed2"],
        ["other-seed9"],
    ]


def test_one_folders_seeds_are_not_the_others(run_of):
    runs = [run_of(f"uniform-seed1 ({place})", [9, 9, 9]) for place in ("a", "b")]
    assert len(seed_groups(Comparison(tuple(runs), None))) == 2


def test_a_run_whose_record_is_not_there_is_by_itself(run_of):
    runs = [Evaluated(f"x-seed{i}", "x", run_of("y", [9, 9, 9]).result, None) for i in (1, 2)]
    assert len(seed_groups(Comparison(tuple(runs), None))) == 2


def test_seeds_are_told_by_mean_and_deviation_and_paired_by_seed(seeded):
    # Uniform 20, 22, 24; Chameleon 19, 20, 21; of seeds 2 and 3 -3 and -4.
    (sentence,) = verdicts(seeded)
    assert sentence == (
        "Chameleon has an average perplexity of 20.00 ± 1.00 over 3 seeds, Uniform of "
        "22.00 ± 2.00 over 3 seeds (-9.1%, -3.50 ± 0.71 paired by the 2 seeds that both have); "
        "the mean of Chameleon is lower in 2 of 3 domains. ± is the standard deviation across "
        "seeds."
    )


def test_seeds_beside_a_single_baseline_are_not_paired(seeded):
    runs = (seeded.runs[1], *seeded.runs[3:])
    (sentence,) = verdicts(Comparison(runs, runs[0]))
    assert "uniform-seed2 of 22.00 over 1 seed (-9.1%);" in sentence


def test_a_single_run_keeps_its_sentence(run_of):
    runs = (
        run_of("uniform-seed1", [20, 20, 20], label="Uniform"),
        run_of("c-seed1", [19, 19, 19], SKEWED, "chameleon-pretrain", label="Chameleon"),
    )
    assert verdicts(Comparison(runs, runs[0])) == [
        "Chameleon has an average perplexity of 19.00, Uniform of 20.00 (-5.0%); "
        "Chameleon is lower in 3 of 3 domains."
    ]


def test_seeds_of_the_baseline_alone_are_told(seeded):
    (sentence,) = findings(Comparison(seeded.runs[:3], seeded.runs[0]))
    assert sentence.startswith("Uniform has an average perplexity of 22.00 ± 2.00 over 3 seeds,")


def test_without_a_baseline_each_method_has_a_sentence(seeded):
    runs = (seeded.runs[0], *seeded.runs[3:])
    one, several = findings(Comparison(runs, None))
    assert one == "uniform-seed1 has an average perplexity of 20.00 over 3 domains."
    assert several.startswith("Chameleon has an average perplexity of 20.00 ± 1.00 over 3 seeds, ")


def test_two_mixtures_of_one_method_go_by_their_names(seeded, run_of):
    third = [run_of(f"other-seed{s}", [9, 9, 9], {"code": 1.0}, "chameleon-pretrain") for s in "12"]
    found = [group.label for group in seed_groups(Comparison((*seeded.runs, *third), None))]
    assert found == ["Uniform", "chameleon", "other"]


def test_an_infinite_average_has_no_ratio(seeded, run_of):
    broken = run_of("chameleon-seed1", [9, 9, math.inf], SKEWED, "chameleon-pretrain")
    (sentence,) = verdicts(Comparison((*seeded.runs, broken), seeded.runs[0]))
    assert "nan" not in sentence
    assert "%" not in sentence
    assert sentence.startswith("Chameleon has an average perplexity of inf over 4 seeds, ")
    single = (seeded.runs[0], broken)
    (sentence,) = verdicts(Comparison(single, single[0]))
    assert "inf, uniform-seed1 of 20.00; chameleon-seed1 is lower in 2 of 3 domains." in sentence


def test_the_table_over_seeds_has_a_column_for_each_method(seeded):
    table = seed_table(seeded)
    assert table is not None
    assert table.header == ("domain", "perplexity Uniform", "perplexity Chameleon")
    texts = [list(row) for row in (*table.rows, *table.summary)]
    assert texts == [
        [NAMES[0], "19.00 ± 2.00", "17.00 ± 1.00"],
        [NAMES[1], "22.00 ± 2.00", "23.00 ± 1.00"],
        [NAMES[2], "25.00 ± 2.00", "20.00 ± 1.00"],
        ["average", "22.00 ± 2.00", "20.00 ± 1.00"],
        ["domains better than Uniform", "-", "2 of 3"],
    ]
    assert [[is_best(cell) for cell in row[1:]] for row in table.rows] == [
        [False, True],
        [True, False],
        [False, True],
    ]
    assert table.notes[0].endswith("; seeds: Uniform 3, Chameleon 3.")


def test_a_single_run_has_no_deviation_beside_methods_with_seeds(seeded, run_of):
    runs = (*seeded.runs, run_of("mine", [1, 2, math.inf], SKEWED, "mine"))
    table = seed_table(Comparison(runs, None))
    assert table is not None
    assert [row[3] for row in table.rows] == ["1.00", "2.00", "inf"]
    assert [row[0] for row in table.summary] == ["average"]
    assert not is_best(table.rows[2][3])


def test_no_two_columns_are_called_alike(run_of):
    names = ["mine-seed1", "mine-seed2", "mine"]
    table = seed_table(
        Comparison(tuple(run_of(name, [9, 9, 9], method="x") for name in names), None)
    )
    assert table is not None
    assert table.header == ("domain", "perplexity mine-seed1", "perplexity mine")


def test_without_several_seeds_there_is_no_table_over_seeds(run_of):
    runs = (run_of("uniform-seed1", [9, 9, 9]), run_of("other-seed1", [9, 9, 9], SKEWED))
    assert seed_table(Comparison(runs, runs[0])) is None
