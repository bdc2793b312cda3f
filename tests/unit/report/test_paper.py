"""The report shows the paper's numbers next to those of runs in the same setting."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_chameleon.artifacts import EvaluationResult, Mixture
from megatron_chameleon.report.paper import (
    paper_names,
    paper_settings,
    paper_tables,
    printed_figures,
)
from megatron_chameleon.report.results import compare
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.samples import (
    CHAMELEON,
    DOWNSTREAM_PROTOCOL,
    RUNS,
    UNIFORM,
    downstream,
    edit_evaluation,
    edit_run,
    rows_of,
    save,
    write_run_folder,
)

SLIMPAJAMA = ["arxiv", "book", "cc", "c4", "github", "stackexchange", "wikipedia"]
BOOKS = ["ArXiv", "Books", "Common-Crawl", "C4", "GitHub", "stack_exchange", "Wiki"]
REDPAJAMA = ["ArXiv", "Book", "CommonCrawl", "C4", "Github", "StackExchange", "Wikipedia"]
TOKENS = 10_000 * 128 * 1024


def edit_runs(root, **changes):
    for name in RUNS:
        edit_run(root, name, **changes)


@pytest.fixture
def root(tmp_path):
    root = write_run_folder(tmp_path / "run", SLIMPAJAMA)
    model = dict(paper_settings()["slimpajama-684m"].model)
    edit_runs(root, model=model, tokens=TOKENS, parameters=684_000_000)
    return root


def tables_of(root):
    folder = RunFolder.load(root)
    return paper_tables(folder, compare(folder))


def column_of(table, heading):
    return table.cells.set_index(table.header[0])[heading]


@pytest.mark.parametrize(
    ("names", "data_set"),
    [
        ([f"RedPajama{name}" for name in REDPAJAMA], "slimpajama"),
        (BOOKS, "slimpajama"),
        ([f"slimpajama/{name}" for name in SLIMPAJAMA], "slimpajama"),
        (["wiki40b.fr", "de", "Italian", "es", "pt", "nl", "pl"], "wiki40b"),
        (["python", "java", "c", "cpp", "golang", "ruby", "php"], "stack"),
    ],
)
def test_spellings_of_domain_names_are_recognized(names, data_set):
    sets = {setting.data_set: setting for setting in paper_settings().values()}
    found = {name: paper_names(each, names) for name, each in sets.items()}
    assert [name for name, known in found.items() if known is not None] == [data_set]
    printed = next(iter(sets[data_set].columns.values())).printed
    assert list((found[data_set] or {}).values()) == list(printed)
    for others in (names[:-1], [*names[:-1], "news"], [*names, names[0].upper()]):
        assert paper_names(sets[data_set], others) is None


def test_perplexities_are_shown_next_to_the_papers(root):
    perplexity = tables_of(root)[0]
    setting = paper_settings()["slimpajama-684m"]
    assert perplexity.header[:4] == ("domain", "Uniform", "Chameleon", "paper: Uniform")
    found = column_of(perplexity, "paper: DoGE")
    doge = printed_figures(setting.perplexity[0])["doge"]
    assert [float(found[name]) for name in SLIMPAJAMA] == list(doge)
    assert found["average"] == "22.32"
    assert found["domains better than Uniform"] == "4 of 7"
    result = EvaluationResult.load(root / f"6-evaluation/{UNIFORM}.json")
    assert column_of(perplexity, "Uniform")["average"] == f"{result.mean_perplexity:.2f}"


def test_domain_without_text_is_excluded_from_all_averages(root):
    for name in RUNS:
        result = EvaluationResult.load(root / f"6-evaluation/{name}.json")
        domains = {n: d for n, d in result.domains.items() if n != "c4"}
        edit_evaluation(root, name, domains=domains, left_out=["c4"])
    perplexity = tables_of(root)[0]
    found = column_of(perplexity, "paper: Uniform")
    assert found["c4"] == "49.00"
    setting = paper_settings()["slimpajama-684m"]
    printed = printed_figures(setting.perplexity[0])["uniform"]
    rest = sum(value for name, value in printed.items() if name != "c4") / 6
    assert found["average"] == f"{rest:.2f}"
    assert column_of(perplexity, "paper: DoGE")["domains better than Uniform"] == "3 of 6"
    assert column_of(perplexity, "Uniform")["c4"] == "-"
    assert "Excluded from averages and counts: c4." in perplexity.notes


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"num_layers": 2}},
        {"model": {"num_layers": 36, "hidden_size": 1200}},
        {"tokens": TOKENS // 3},
    ],
)
def test_runs_in_another_setting_are_not_compared_with_the_paper(root, changes):
    edit_runs(root, **changes)
    assert tables_of(root) == []


def test_accuracies_are_shown_next_to_the_papers(root):
    protocol = dataclasses.replace(DOWNSTREAM_PROTOCOL, shots=list(range(6)))
    for run, accuracy in ((UNIFORM, 0.5), (CHAMELEON, 0.6)):
        tasks = dict.fromkeys(("sciq", "copa", "own_task"), dict.fromkeys(range(6), accuracy))
        save(root, f"{run}-downstream", downstream(tasks, protocol))
    _, table, *_ = tables_of(root)
    assert column_of(table, "Chameleon")["sciq"] == "60.0"
    paper = column_of(table, "paper: Chameleon")
    assert paper["sciq"] == "64.3"
    assert paper["own_task"] == "-"
    assert paper["average"] == f"{(64.3 + 61.9) / 2:.1f}"
    assert paper["tasks better than Uniform"] == "2 of 2"
    assert column_of(table, "Chameleon")["tasks better than Uniform"] == "2 of 2"


def test_costs_are_shown_next_to_the_papers(root):
    Mixture(weights=dict.fromkeys(SLIMPAJAMA, 1 / 7), method="doge").save(
        root / "4-mixture/my-doge.json"
    )
    found = rows_of(tables_of(root)[-1])
    assert found["my-doge"][-2:] == ["6.68e+17", "6.3"]
    assert found["chameleon-pretrain"][-2:] == ["1.36e+17", "0.8"]
    assert found["chameleon-finetune"][-2:] == ["-", "-"]
    assert found["DoReMi (not here)"] == ["-", "-", "-", "1.34e+18", "7.4"]
    assert "DoGE (not here)" not in found
