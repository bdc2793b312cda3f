"""The paper's printed results: as they stand in print, and what does not follow from the rows."""

from __future__ import annotations

from importlib import resources

import pytest

from megatron_chameleon.artifacts.published.columns import published_columns
from megatron_chameleon.model.sizes import SIZES
from megatron_chameleon.report.paper import paper_settings, published_tables
from megatron_chameleon.report.paper.columns import ACCURACY, PERPLEXITY, disagreements
from tests.unit.json_names import check_names_are_unique

SLIMPAJAMA, LARGE, PILE, WIKI, STACK = (
    "slimpajama-684m",
    "slimpajama-1.2b",
    "pile-684m",
    "wiki40b-684m",
    "stack-684m",
)
NAMES = (SLIMPAJAMA, LARGE, PILE, WIKI, STACK)


def setting(name):
    return paper_settings()[name]


def table_of(name, part):
    (found,) = [table for table in published_tables(setting(name)) if part in table.title]
    return found


def column_of(table, heading):
    i = table.header.index(heading)
    return {row[0].text: row[i] for row in (*table.rows, *table.summary)}


def test_the_settings_are_the_papers():
    assert tuple(paper_settings()) == NAMES
    assert [setting(name).fine_tuned for name in NAMES] == [False, False, False, True, True]
    assert [setting(name).batch_size for name in NAMES] == [128, 128, 512, 128, 128]
    assert [setting(name).baseline for name in NAMES] == ["uniform"] * 2 + ["human"] + [
        "uniform"
    ] * 2


@pytest.mark.parametrize("name", NAMES)
def test_the_models_are_those_that_are_trained_here(name):
    size = SIZES[setting(name).size]
    assert {field: getattr(size, field) for field in setting(name).model} == setting(name).model


@pytest.mark.parametrize("name", NAMES)
def test_all_columns_have_the_same_rows_and_the_domains_are_those_of_the_weights(name):
    found = setting(name)
    weights = next(iter(found.data_set.weight_columns().values()))
    for table in (*found.perplexity, *found.downstream):
        for column in table.columns.values():
            assert list(column.printed) == table.rows
    for table in found.perplexity:
        assert set(table.rows) == set(weights.printed)
    for table in found.downstream:
        assert len(table.rows) == 13


def test_some_figures_as_they_stand_in_print():
    for name, kind, number, method, row, printed in (
        (SLIMPAJAMA, "perplexity", 0, "uniform", "c4", 49.0),
        (SLIMPAJAMA, "perplexity", 1, "doremi", "book", 52.07),
        (SLIMPAJAMA, "perplexity", 2, "mixing-laws", "arxiv", 7.55),
        (LARGE, "perplexity", 0, "regmix", "wikipedia", 20.08),
        (PILE, "perplexity", 0, "regmix", "europarl", 131.8),
        (PILE, "perplexity", 0, "chameleon", "wikipedia_en", 24.68),
        (WIKI, "perplexity", 0, "chameleon-finetune", "polish", 4.21),
        (STACK, "perplexity", 0, "chameleon-pretrain", "cpp", 23.83),
        (SLIMPAJAMA, "downstream", 0, "chameleon", "qqp", 39.2),
        (SLIMPAJAMA, "downstream", 1, "mixing-laws", "openbookqa", 25.2),
        (LARGE, "downstream", 0, "doge", "winogrande", 48.9),
        (PILE, "downstream", 0, "doge", "lambada_openai", 9.3),
    ):
        assert getattr(setting(name), kind)[number].columns[method].printed[row] == printed


def test_what_does_not_follow_from_the_rows_is_told_and_nothing_else():
    found = {}
    for name in NAMES:
        for kind, tables in (
            (PERPLEXITY, setting(name).perplexity),
            (ACCURACY, setting(name).downstream),
        ):
            for table in tables:
                told = disagreements(kind, table, setting(name).baseline, tables[0])
                if told:
                    found[name, table.caption] = told
    chameleon = "average of Chameleon 22.31 (its rows: 22.33)"
    better = "domains in which {} is better than Human {} (its rows: {})"
    assert list(found.values()) == [
        [chameleon],
        ["average of DoGE 23.01 (its rows: 22.94)", chameleon],
        [chameleon],
        ["average of Uniform 37.9 (its rows: 38.1)"],
        [
            better.format("DoReMi", 9, 10),
            better.format("DoGE", 10, 8),
            better.format("RegMix", 4, 5),
        ],
        ["average of Uniform 9.43 (its rows: 9.39)"],
    ]


def test_averages_and_counts_are_of_the_rows():
    table = table_of(PILE, "Transfer to new domains - perplexity")
    rows = setting(PILE).perplexity[0].columns
    human, doge = rows["human"].printed, rows["doge"].printed
    column = column_of(table, "DoGE")
    assert column["average"].text == f"{sum(doge.values()) / 17:.2f}"
    better = sum(doge[name] < human[name] for name in human)
    assert column["domains better than Human"].text == f"{better} of 17" == "8 of 17"
    assert column_of(table, "Human")["domains better than Human"].text == "-"
    assert "DoGE is better than Human 10 (its rows: 8)" in table.notes[-1]


def test_the_best_is_marked_by_the_rows():
    table = table_of(SLIMPAJAMA, "Universal generalization - perplexity")
    average = {name: column_of(table, name)["average"] for name in table.header[1:]}
    # By the printed averages it would be Chameleon, 22.31.
    assert [name for name, cell in average.items() if cell.best] == ["DoGE"]
    accuracy = table_of(SLIMPAJAMA, "Universal generalization - reasoning")
    assert column_of(accuracy, "RegMix")["arc_easy"].best
    assert not column_of(accuracy, "Uniform")["arc_easy"].best


def test_counts_of_a_table_without_the_baseline_are_against_the_first_tables():
    table = table_of(SLIMPAJAMA, "proxy model trained for 2k steps")
    assert table.header == ("domain", "DoReMi", "DoGE", "Chameleon")
    assert column_of(table, "DoReMi")["domains better than Uniform"].text == "3 of 7"


def test_weights_are_those_that_the_methods_take():
    table = table_of(PILE, "Domain weights")
    printed = published_columns()["pile/chameleon"].printed
    column = column_of(table, "Chameleon")
    for name, weight in printed.items():
        assert float(column[name].text) == weight
    assert column["sum"].text == "1.0171"
    assert "Human 0.9980, DoGE 1.1346, Chameleon 1.0171, RegMix 0.9980" in table.notes[-1]
    assert len(table_of(SLIMPAJAMA, "Final domain weights").notes) == 1


def test_costs_hours_and_ratios():
    table = table_of(SLIMPAJAMA, "cost to obtain")
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["DoReMi"] == ["1.34e+18", "9.9x", "7.4", "9.2x"]
    assert rows["Chameleon"] == ["1.36e+17", "1.0x", "0.8", "1.0x"]
    assert rows["Data Mixing Laws"] == ["5.36e+19", "394.1x", "-", "-"]
    assert rows["Uniform"] == ["0", "-", "-", "-"]
    notes = " ".join(table.notes)
    assert "1.7 times" in notes
    assert "684m took 56 H100 hours" in notes
    assert "2.5 times" in " ".join(table_of(PILE, "cost to obtain").notes)


def test_what_is_not_printed_has_no_table():
    assert [table.title.partition(": ")[0] for table in published_tables(setting(WIKI))] == [
        "Wiki40b, 684m",
        "Wiki40b",
    ]


def test_no_figure_of_the_file_is_there_twice():
    text = resources.files("megatron_chameleon.report.paper").joinpath("results.json")
    check_names_are_unique(text.read_text())
