"""Tables of target tokens and got: per domain, by groups of seeds, and few lines for many runs."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_chameleon.artifacts import DrawnTokens, MixturePhase, TrainingRun
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.weights import MOST_TABLES, token_tables
from tests.unit.report.report_samples import NAMES, write_run_folder, write_training_run

UNIFORM, CHAMELEON = "uniform-seed1", "chameleon-pretrain-seed1"


@pytest.fixture
def root(tmp_path):
    return write_run_folder(tmp_path / "run")


def drawn(asked, got, epochs=None):
    """For each of NAMES."""
    epochs = epochs or [1.0] * len(NAMES)
    return {
        name: DrawnTokens(weight=1 / len(NAMES), asked=a, got=g, epochs=e)
        for name, a, g, e in zip(NAMES, asked, got, epochs, strict=True)
    }


def add_run(root, name, tokens, method="uniform", **changes):
    weights = dict.fromkeys(NAMES, 1 / len(NAMES))
    write_training_run(root / "5-base" / name, weights, method, domain_tokens=tokens, **changes)


def tables_of(root):
    return token_tables(RunFolder.load(root))


def rows_of(table):
    return {row[0]: list(row[1:]) for row in (*table.rows, *table.summary)}


def test_runs_that_do_not_say_what_they_drew_have_no_table(root):
    assert tables_of(root) == []


def test_asked_got_difference_and_epochs_are_shown(root):
    add_run(root, UNIFORM, drawn([1000.4, 2000.0, 0.0], [1010, 1900, 0], [0.5, 12.34, 0.0]))
    (table,) = tables_of(root)
    assert table.title == "Sampled tokens: Uniform"
    assert table.header == ("domain", "target tokens", "actual tokens", "difference", "epochs")
    found = rows_of(table)
    assert found["code"] == ["1,000", "1,010", "+0.96%", "0.5"]
    assert found["a|b_<x>"] == ["2,000", "1,900", "-5.00%", "12.3"]
    assert found["prose"] == ["0", "0", "-", "0"]
    assert found["total"] == ["3,000", "2,910", "-3.01%", ""]


def test_seeds_of_one_mixture_share_a_table_of_ranges(root):
    add_run(root, UNIFORM, drawn([1000.0] * 3, [1000, 990, 1000], [1.0, 0.99, 1.0]))
    add_run(root, "uniform-seed2", drawn([1000.0] * 3, [1000, 1010, 1000], [1.0, 1.01, 1.0]))
    add_run(root, "other", drawn([1000.0] * 3, [1, 2, 3]), method="natural")
    first, second = tables_of(root)
    assert first.title == "Sampled tokens: uniform-seed1 and 1 more with the same weights"
    found = rows_of(first)
    assert found["code"] == ["1,000", "1,000", "+0.00%", "1"]
    assert found["a|b_<x>"] == ["1,000", "990 to 1,010", "-1.00% to +1.00%", "0.99 to 1.01"]
    assert found["total"] == ["3,000", "2,990 to 3,010", "-0.33% to +0.33%", ""]
    assert any(note.endswith("uniform-seed1, uniform-seed2.") for note in first.notes)
    assert second.title == "Sampled tokens: other"


def test_runs_of_other_lengths_are_apart(root):
    add_run(root, UNIFORM, drawn([1000.0] * 3, [1000] * 3))
    add_run(root, "uniform-seed2", drawn([2000.0] * 3, [2000] * 3))
    assert len(tables_of(root)) == 2


def test_many_mixtures_are_a_row_each(root):
    count = MOST_TABLES + 1
    for i in range(count):
        tokens = drawn([1000.0 + i] * 3, [1000 + i, 900, 1001 + i], [1.0, 0.5, 2.0 + i])
        add_run(root, f"run-{i}", tokens, method="manual")
    (table,) = tables_of(root)
    assert len(table.rows) == count
    assert rows_of(table)["run-0"] == ["3,000", "-10.00% (a|b_<x>)", "2 (prose)"]
    assert rows_of(table)["run-6"] == ["3,018", "-10.54% (a|b_<x>)", "8 (prose)"]


def test_a_hundred_seeds_are_one_table(root):
    for i in range(100):
        add_run(root, f"seed-{i:03}", drawn([1000.0] * 3, [1000 + i] * 3))
    (table,) = tables_of(root)
    assert table.title.endswith("seed-000 and 99 more with the same weights")
    assert rows_of(table)["code"][1] == "1,000 to 1,099"
    assert max(map(len, table.notes)) < 300


def test_changed_weights_and_unfinished_runs_are_told(root):
    add_run(root, UNIFORM, drawn([1000.0] * 3, [1000] * 3), status="running")
    run = TrainingRun.load(root / "5-base" / UNIFORM)
    phases = [MixturePhase(0, run.mixture), MixturePhase(10, run.mixture)]
    dataclasses.replace(run, mixture_phases=phases).save()
    (table,) = tables_of(root)
    assert f"The weights changed during training: {UNIFORM}." in table.notes
    assert f"Training has not finished: {UNIFORM}." in table.notes
