"""The ledger as tables."""

from __future__ import annotations

import pytest

from megatron_chameleon.report.cost_tables import (
    cost_table,
    format_hours,
    format_ratio,
    mixture_cost_table,
)
from megatron_chameleon.report.ledger import ledger_of
from megatron_chameleon.report.page import make_report
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.ledger_samples import (
    cells_of,
    edit_mixture,
    write_ledger_folder,
)


@pytest.fixture
def root(tmp_path):
    return write_ledger_folder(tmp_path / "run")


def test_the_cost_table_adds_up(root):
    table = cost_table(ledger_of(RunFolder.load(root)))
    found = cells_of(table)
    assert found["1-corpus"] == ["-", "4.5", "4.5", "1"]
    assert found["2-proxy/tiny-seed1"] == ["3.00e+12", "8.0", "16.0", "2"]
    assert found["4-mixture/doremi/proxy"] == ["7.00e+12", "25.0", "50.0", "2"]
    for column in (1, 2):
        *parts, total = (float(cells[column]) for cells in found.values() if cells[column] != "-")
        assert total == pytest.approx(sum(parts))
    assert found["total"][0] == "4.08e+13"


def test_each_mixture_has_its_cost_in_hours_and_as_a_ratio(root):
    edit_mixture(root, "doremi", parameters={"made_from": ["doremi"], "paper_flops": 1.34e18})
    folder = RunFolder.load(root)
    table = mixture_cost_table(ledger_of(folder), folder)
    assert table.header == (
        "mixture",
        "FLOPs",
        "device-hours",
        "FLOPs / chameleon-pretrain",
        "device-hours / chameleon-pretrain",
        "FLOPs as the paper counts",
    )
    found = cells_of(table)
    assert found["chameleon-pretrain"] == ["3.40e+12", "0.00625", "1.0x", "1.0x", "-"]
    assert found["doremi"] == ["1.20e+13", "0.0226", "3.5x", "3.6x", "1.34e+18"]
    assert found["uniform"] == ["-", "-", "-", "-", "-"]
    base = "Training 5-base/chameleon-pretrain-seed1 took 1.25e+13 FLOPs and 0.0167 device-hours."
    assert base in table.notes


def test_without_chameleon_there_are_no_ratios(root):
    for mode in ("pretrain", "finetune"):
        (root / f"4-mixture/chameleon-{mode}.json").unlink()
    folder = RunFolder.load(root)
    table = mixture_cost_table(ledger_of(folder), folder)
    assert table.header == ("mixture", "FLOPs", "device-hours")


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.0, "-"), (3600.0, "1"), (36.0, "0.01"), (4_440_000.0, "1,233")]
)
def test_hours_have_three_digits(seconds, told):
    assert format_hours(seconds) == told


@pytest.mark.parametrize(
    ("cost", "told"), [(0.0, "-"), (11.63, "5.8x"), (0.5, "0.25x"), (2.0, "1.0x")]
)
def test_a_ratio_of_nothing_is_none(cost, told):
    assert format_ratio(cost, 2.0) == told
    assert format_ratio(1.0, 0.0) == "-"


def test_the_report_shows_the_ledger(root, capsys):
    make_report(root)
    printed = capsys.readouterr().out
    assert "Cost to obtain each mixture" in printed
    assert "4-mixture/doremi/reference" in printed
